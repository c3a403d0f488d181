"""A checkpoint folder: the files of its weights and where each tensor lies in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from greenroom.errors import CheckpointError, NotAModel, UnsupportedModel
from greenroom.hf.checkpoint.header import LONGEST, StoredTensor, read_header
from greenroom.hf.checkpoint.quantised import combine_codes_and_scales
from greenroom.hf.checkpoint.read import read_tensor
from greenroom.json_file import Malformed, printable, read_object, show_value

if TYPE_CHECKING:
    from greenroom.hf.checkpoint.pack.reading import Pack

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LONGEST_NAME = 255  # of a file
PICKLES = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a config and safetensors files; only headers have been read.

    files:   absolute paths; `StoredTensor.file` is a position in them
    tensors: by the names of an unquantised checkpoint: codes and scales are one encoded tensor
    stored:  by the names in the files
    pack:    where the experts are, of a checkpoint that is a pack's dense parts
    """

    folder: Path
    config: dict[str, Any]
    files: tuple[str, ...]
    tensors: Mapping[str, StoredTensor]
    stored: Mapping[str, StoredTensor]
    pack: Pack | None = None

    @classmethod
    def of(
        cls,
        folder: Path,
        config: dict[str, Any],
        names: Sequence[str],
        stored: dict[str, StoredTensor],
    ) -> Checkpoint:
        """Of files in a folder, and the tensors that their headers say."""
        files = tuple(str(folder / name) for name in names)
        return cls(folder, config, files, combine_codes_and_scales(config, stored, folder), stored)

    @classmethod
    def of_files(
        cls, folder: Path, config: dict[str, Any], names: Sequence[str], wanted: Mapping[str, str]
    ) -> Checkpoint:
        """Of safetensors files, whose headers are read; `wanted` says which file has a tensor."""
        tensors: dict[str, StoredTensor] = {}
        for number, name in enumerate(names):
            found = read_header(folder / name, number)
            # A name that two files have belongs to the one that the index says.
            tensors.update((k, v) for k, v in found.items() if wanted.get(k, name) == name)
            if lost := next((k for k, f in wanted.items() if f == name and k not in found), None):
                raise CheckpointError(
                    f"{folder / name}: lacks {printable(lost)}, which {INDEX} says it has"
                )
        return cls.of(folder, config, names, tensors)

    @property
    def source(self) -> dict[str, Any]:
        """What transformers' `from_pretrained` methods are to be called with."""
        return {"pretrained_model_name_or_path": self.folder, "local_files_only": True}

    def read_by_transformers(self) -> AbstractContextManager[None]:
        """To be held while transformers reads the files by itself."""
        return nullcontext()

    def read(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        empty: Callable[..., torch.Tensor] = torch.empty,
    ) -> torch.Tensor:
        """One tensor, cast to `dtype`, expanded where it is encoded, in memory from `empty`."""
        return read_tensor(self.files, name, self.tensors[name], dtype, empty)

    def read_stored(self, name: str) -> torch.Tensor:
        """One tensor as it lies in its file, under its name there."""
        return read_tensor(self.files, name, self.stored[name])


def read_folder(folder: Path) -> Checkpoint:
    """The checkpoint of a folder of safetensors; NotAModel, UnsupportedModel or CheckpointError."""
    config = read_config(folder)
    return Checkpoint.of_files(folder, config, *_shards(folder))


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json; NotAModel where there is none, or it is no model's."""
    path = folder / "config.json"
    if not path.is_file():
        raise NotAModel(f"{folder}: no config.json, so this is not a model's folder")
    config = read_object(path, NotAModel).values
    if not isinstance(config.get("model_type"), str):
        raise NotAModel(f"{path}: names no model_type, so this is not a model's config")
    return config


def _shards(folder: Path) -> tuple[list[str], dict[str, str]]:
    """(file names, tensor -> file as the index says; empty without an index)."""
    if (folder / SINGLE).is_file():
        return [SINGLE], {}
    index = folder / INDEX
    if not index.is_file():
        raise _no_weights(folder)
    try:
        table = read_object(index, CheckpointError, LONGEST).object("weight_map")
        wanted = {name: table.text(name) for name in table}
    except Malformed as error:
        raise CheckpointError(f"{index}: damaged, it has no usable weight_map: {error}") from error
    names = sorted({*wanted.values()})
    if not names:
        raise CheckpointError(f"{index}: damaged, its weight_map is empty")
    for name in names:
        if not name.isprintable() or len(name) > LONGEST_NAME:
            raise CheckpointError(f"{index}: damaged, it names the file {show_value(name)}")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{index}: names {name!r}, which lies outside the folder")
        if not name.endswith(".safetensors"):
            raise UnsupportedModel(f"{index}: names {name!r}, but only safetensors are read")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: missing, though {INDEX} names it")
    return names, wanted


def _no_weights(folder: Path) -> Exception:
    """The error for a folder without model.safetensors and without an index."""
    if next(folder.glob("model-*.safetensors"), None):
        return CheckpointError(f"{folder / INDEX}: missing, though there are shards beside it")
    if gguf := next(iter(sorted(folder.glob("*.gguf"))), None):
        return NotAModel(f"{folder}: no safetensors; give the GGUF file itself: {gguf}")
    if pickle := next((p for pattern in PICKLES for p in sorted(folder.glob(pattern))), None):
        return UnsupportedModel(
            f"{folder}: its weights are pickles ({pickle.name}): only safetensors are read"
        )
    return NotAModel(f"{folder}: no {SINGLE} and no {INDEX}")
