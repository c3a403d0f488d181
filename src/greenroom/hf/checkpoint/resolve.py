"""Find and open the model that a user names: a folder, a GGUF file, a pack, or a hub id."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from greenroom.errors import GreenroomError, NotAModel
from greenroom.hf.checkpoint.checkpoint import Checkpoint, read_config, read_folder
from greenroom.hf.checkpoint.gguf import GgufCheckpoint
from greenroom.hf.checkpoint.gguf_file import model_in
from greenroom.hf.checkpoint.hub import cached_snapshot, download, read_remote
from greenroom.hf.checkpoint.names import check_name
from greenroom.hf.checkpoint.pack.reading import is_pack, open_pack, refuse_unfinished


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a folder, a GGUF file or a pack: read its config and all headers.

    Raises NotAModel, UnsupportedModel or CheckpointError.
    """
    path = Path(path).absolute()
    if path.suffix == ".gguf" and not path.is_dir():
        return GgufCheckpoint.open(path)
    return open_pack(path) if is_pack(path) else read_folder(path)


def find_checkpoint(model: str | os.PathLike[str]) -> Checkpoint:
    """Open the checkpoint that a path or hub id names, downloaded where needed."""
    return open_checkpoint(resolve(model))


def resolve(model: str | os.PathLike[str]) -> Path:
    """Return the folder or GGUF file of the model that a name stands for.

    `model` is a local folder, `demo` (the model that ships), a hub id, a GGUF file, or a folder
    without a config that holds one GGUF model. A hub id is downloaded (config, tokenizer and
    safetensors only; resumed where it stopped). Raises NotAModel or UnsupportedModel with one line
    that says what to do.
    """
    if (path := find_local(model)) is not None:
        return path
    return download(os.fspath(model))


def find_local(model: str | os.PathLike[str]) -> Path | None:
    """Return the path of a local model, or None for a hub id."""
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
        if not (path / "config.json").is_file() and (file := model_in(path)) is not None:
            return file
        read_config(path)
        return path
    if path.is_file():
        raise NotAModel(
            f"{text}: is a file; give the folder that holds config.json, or a .gguf file"
        )
    return None


def demo_folder() -> Path:
    """Return the folder of the demo model, in the installed package or in the repository."""
    import greenroom

    package = Path(greenroom.__file__).parent
    for folder in (package / "models" / "demo", package.parents[1] / "models" / "demo"):
        if (folder / "config.json").is_file():
            return folder
    raise NotAModel(f"the demo model is not installed with this greenroom ({sys.prefix})")


def open_or_inspect(source: str) -> Checkpoint:
    """Open a local or downloaded checkpoint, else config and headers from the hub."""
    if (path := find_local(source)) is not None:
        return open_checkpoint(path)
    if (folder := cached_snapshot(source)) is not None:
        with suppress(GreenroomError):  # the download is incomplete
            return open_checkpoint(folder)
    return read_remote(source)
