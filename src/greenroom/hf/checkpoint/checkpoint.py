"""A checkpoint folder: its weight files, and the byte range of each tensor in them."""

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
    """A model folder with a config and safetensors files, of which only headers are read.

    files:   absolute paths; `StoredTensor.file` is an index of this tuple
    tensors: by the names of an unquantised checkpoint: codes and scales are one encoded tensor
    stored:  the tensors in the files, by their names there: codes and scales are separate
    pack:    the pack that holds the experts, where this checkpoint is a pack's dense parts
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
        """Make a checkpoint from a folder's file names and the tensors in their headers."""
        files = tuple(str(folder / name) for name in names)
        return cls(folder, config, files, combine_codes_and_scales(config, stored, folder), stored)

    @classmethod
    def of_files(
        cls, folder: Path, config: dict[str, Any], names: Sequence[str], file_of: Mapping[str, str]
    ) -> Checkpoint:
        """Make a checkpoint by reading the headers of safetensors files.

        `file_of` names the file of each tensor, as the index does; it is empty without an index.
        """
        tensors: dict[str, StoredTensor] = {}
        for number, name in enumerate(names):
            in_file = read_header(folder / name, number)
            # Of a tensor that two files contain, the one in the file named by the index counts.
            tensors.update((k, v) for k, v in in_file.items() if file_of.get(k, name) == name)
            if lost := next(
                (k for k, f in file_of.items() if f == name and k not in in_file), None
            ):
                raise CheckpointError(
                    f"{folder / name}: the tensor {printable(lost)} is missing, though {INDEX} says"
                    " that it is in this file"
                )
        return cls.of(folder, config, names, tensors)

    @property
    def pretrained_arguments(self) -> dict[str, Any]:
        """Keyword arguments that make transformers' `from_pretrained` load this checkpoint."""
        return {"pretrained_model_name_or_path": self.folder, "local_files_only": True}

    def read_by_transformers(self) -> AbstractContextManager[None]:
        """Return the context manager in which transformers reads this checkpoint's files itself."""
        return nullcontext()

    def read(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        empty: Callable[..., torch.Tensor] = torch.empty,
    ) -> torch.Tensor:
        """Read one tensor of the checkpoint, dequantised and cast to a dtype.

        `empty` allocates the tensor's memory.
        """
        return read_tensor(self.files, name, self.tensors[name], dtype, empty)

    def read_stored(self, name: str) -> torch.Tensor:
        """Read one tensor as stored (not dequantised), by its name in the file."""
        return read_tensor(self.files, name, self.stored[name])


def read_folder(folder: Path) -> Checkpoint:
    """Open a folder of safetensors files as a checkpoint, by reading only headers.

    Raises NotAModel, UnsupportedModel or CheckpointError.
    """
    config = read_config(folder)
    return Checkpoint.of_files(folder, config, *_shards(folder))


def read_config(folder: Path) -> dict[str, Any]:
    """Read a model folder's config.json; raise NotAModel where it describes no model."""
    path = folder / "config.json"
    if not path.is_file():
        raise NotAModel(f"{folder}: no config.json, so this is not a model's folder")
    config = read_object(path, NotAModel).values
    if not isinstance(config.get("model_type"), str):
        raise NotAModel(f"{path}: names no model_type, so this is not a model's config")
    return config


def _shards(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the names of the weight files, and each tensor's file by the index.

    The second is empty without an index.
    """
    if (folder / SINGLE).is_file():
        return [SINGLE], {}
    index = folder / INDEX
    if not index.is_file():
        raise _no_weights(folder)
    try:
        table = read_object(index, CheckpointError, LONGEST).object("weight_map")
        file_of = {name: table.text(name) for name in table}
    except Malformed as error:
        raise CheckpointError(
            f"{index}: damaged: its weight_map cannot be read: {error}"
        ) from error
    names = sorted({*file_of.values()})
    if not names:
        raise CheckpointError(f"{index}: damaged: its weight_map is empty")
    for name in names:
        if not name.isprintable() or len(name) > LONGEST_NAME:
            raise CheckpointError(f"{index}: damaged: {show_value(name)} is not a valid file name")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{index}: names {name!r}, which lies outside the folder")
        if not name.endswith(".safetensors"):
            raise UnsupportedModel(f"{index}: names {name!r}, but only safetensors are read")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: missing, though {INDEX} names it")
    return names, file_of


def _no_weights(folder: Path) -> Exception:
    """Return the error for a folder without model.safetensors and without a safetensors index."""
    if next(folder.glob("model-*.safetensors"), None):
        return CheckpointError(f"{folder / INDEX}: missing, though there are shards beside it")
    if gguf := next(iter(sorted(folder.glob("*.gguf"))), None):
        return NotAModel(f"{folder}: has no safetensors files; give the GGUF file itself: {gguf}")
    if pickle := next((p for pattern in PICKLES for p in sorted(folder.glob(pattern))), None):
        return UnsupportedModel(
            f"{folder}: its weights are pickles ({pickle.name}): only safetensors are read"
        )
    return NotAModel(f"{folder}: has no weights: neither {SINGLE} nor {INDEX}")
