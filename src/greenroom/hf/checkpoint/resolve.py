"""Find and open the model that a user names: a folder, a GGUF file, a pack, or a hub id."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from greenroom.errors import NotAModel, UsageError
from greenroom.hf.checkpoint.checkpoint import INDEX, SINGLE, Checkpoint, read_config, read_folder
from greenroom.hf.checkpoint.gguf import GgufCheckpoint
from greenroom.hf.checkpoint.gguf_file import model_in
from greenroom.hf.checkpoint.hub.download import cached_model, download
from greenroom.hf.checkpoint.names import check_name
from greenroom.hf.checkpoint.pack.reading import is_pack, open_pack, refuse_unfinished
from greenroom.hf.checkpoint.remote import read_remote


def open_checkpoint(path: str | os.PathLike[str], config: str | None = None) -> Checkpoint:
    """Open a local model as a checkpoint: a safetensors folder, a GGUF file or a pack.

    Only the config and the headers are read. `config` names the config of a GGUF file: a folder, a
    file or a hub id. Raises NotAModel if the path holds no model, UnsupportedModel if the format is
    not supported, CheckpointError if a file is missing or damaged, UsageError for a config of
    another format.
    """
    path = Path(path).absolute()
    if path.suffix == ".gguf" and not path.is_dir():
        return GgufCheckpoint.open(path, config)
    if config is not None:
        raise UsageError(f"--config is for GGUF files, but {path} has a config: leave it out")
    return open_pack(path) if is_pack(path) else read_folder(path)


def find_checkpoint(model: str | os.PathLike[str], config: str | None = None) -> Checkpoint:
    """Open the checkpoint that a path or hub id names; download the model if needed.

    `config` names the config of a GGUF file, as in `open_checkpoint`.
    """
    return open_checkpoint(resolve(model), config)


def resolve(model: str | os.PathLike[str]) -> Path:
    """Return the local folder or GGUF file of the model that a name stands for.

    `model` is a local folder, a GGUF file, a folder without safetensors that holds one GGUF model,
    `demo` (the model that ships with Greenroom), or a hub id, which may name a quantisation of a
    GGUF repository: owner/name:Q4_K_M. The files of a hub id are downloaded if the local cache
    lacks them. Raises NotAModel if there is no such model, OutputError if the download cannot be
    written.
    """
    if (path := find_local(model)) is not None:
        return path
    return download(os.fspath(model))


def find_local(model: str | os.PathLike[str]) -> Path | None:
    """Return the path of a local model, or None for a hub id.

    Raises NotAModel if the name is neither, or if the path holds no model.
    """
    text = os.fspath(model)
    if text == "demo":
        return demo_folder()
    path = Path(text).expanduser()
    refuse_unfinished(path)
    if is_pack(path):
        return path
    check_name(text)
    if path.suffix == ".gguf" and path.is_file():
        return path
    if path.is_dir():
        if not _has_weights(path) and (file := model_in(path)) is not None:
            return file
        read_config(path)
        return path
    if path.is_file():
        raise NotAModel(
            f"{text}: this is a file: give the folder that holds config.json, or a .gguf file"
        )
    return None


def _has_weights(folder: Path) -> bool:
    """True if a folder has a config, and weights in safetensors files."""
    config, *weights = (folder / name for name in ("config.json", SINGLE, INDEX))
    return config.is_file() and any(path.is_file() for path in weights)


def demo_folder() -> Path:
    """Return the folder of the demo model, in the installed package or in the repository."""
    import greenroom

    package = Path(greenroom.__file__).parent
    for folder in (package / "models" / "demo", package.parents[1] / "models" / "demo"):
        if (folder / "config.json").is_file():
            return folder
    raise NotAModel(
        f"the demo model is not installed with this Greenroom ({sys.prefix}): install Greenroom"
        " again, or name another model"
    )


def open_or_inspect(source: str, config: str | None = None) -> Checkpoint:
    """Open a model as a checkpoint without downloading weights.

    A local or downloaded model is opened from disk; of others, the config and the headers are read
    from the hub. `config` names the config of a GGUF file, as in `open_checkpoint`.
    """
    if (path := find_local(source)) is not None:
        return open_checkpoint(path, config)
    if (path := cached_model(source)) is not None:
        return open_checkpoint(path, config)
    return read_remote(source, config)
