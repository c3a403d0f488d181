"""A checkpoint folder: its weight files, and the byte range of each tensor in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from greenroom.errors import CheckpointError, NotAModel, UnsupportedModel
from greenroom.hf.checkpoint.header import LONGEST, StoredTensor, read_header
from greenroom.hf.checkpoint.quantised.methods import combine_codes_and_scales, settings_of
from greenroom.hf.checkpoint.read import read_tensor
from greenroom.json_file import Malformed, printable, read_object, show_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from greenroom.hf.checkpoint.pack.reading import Pack

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MODELOPT = "hf_quant_config.json"  # ModelOpt's settings, where config.json has none
LONGEST_NAME = 255  # of a file
PICKLES = ("*.bin", "*.pt", "*.pth")


class HeaderTensors(Mapping[str, StoredTensor]):
    """Tensors in the headers of safetensors files, which are read at the first look-up.

    Of a quantised model with an expert a tensor they take 50 MB, and only `verify` needs them.
    """

    def __init__(self, files: Sequence[str], without: frozenset[tuple[int, str]]) -> None:
        """`without` are tensors to leave out: numbers of files, and names."""
        self._files, self._without = files, without

    @cached_property
    def _tensors(self) -> dict[str, StoredTensor]:
        return {
            name: tensor
            for number, path in enumerate(self._files)
            for name, tensor in read_header(Path(path), number).items()
            if (number, name) not in self._without
        }

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk: its config, files, and the byte range of each tensor.

    files:   absolute paths of the weight files; `StoredTensor.file` is an index into this tuple
    tensors: the tensors by the names of an unquantised checkpoint; a quantised matrix is one
             encoded tensor, which includes its scales
    stored:  the tensors by their names in the files; codes and scales are separate tensors
    pack:    the Greenroom pack that holds the experts, if this checkpoint was opened from a pack;
             `tensors` are then only the weights outside the experts
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
        """Make a checkpoint from its file names and the tensors in their headers.

        Raises CheckpointError or UnsupportedModel if a quantised checkpoint cannot be decoded.
        """
        files = tuple(str(folder / name) for name in names)
        return cls(folder, config, files, combine_codes_and_scales(config, stored, folder), stored)

    @classmethod
    def of_files(
        cls, folder: Path, config: dict[str, Any], names: Sequence[str], file_of: Mapping[str, str]
    ) -> Checkpoint:
        """Make a checkpoint by reading the headers of safetensors files.

        `file_of` maps tensor names to file names, like `weight_map` in
        model.safetensors.index.json; it is empty if the checkpoint has no such index. Raises
        CheckpointError if a header is damaged, or lacks a tensor that `file_of` promises.
        """
        tensors: dict[str, StoredTensor] = {}
        shadowed: set[tuple[int, str]] = set()
        expected: dict[str, list[str]] = {}
        for tensor, file in file_of.items():
            expected.setdefault(file, []).append(tensor)
        for number, name in enumerate(names):
            in_file = read_header(folder / name, number)
            # Of a tensor that two files contain, the one in the file named by the index counts.
            others = {k for k in in_file if file_of.get(k, name) != name}
            shadowed.update((number, k) for k in others)
            tensors.update((k, v) for k, v in in_file.items() if k not in others)
            if lost := next((k for k in expected.get(name, ()) if k not in in_file), None):
                raise CheckpointError(
                    f"{folder / name}: the tensor {printable(lost)} is missing, though {INDEX} says"
                    " that it is in this file: download the model again"
                )
        checkpoint = cls.of(folder, config, names, tensors)
        if checkpoint.tensors is tensors:
            return checkpoint
        return replace(checkpoint, stored=HeaderTensors(checkpoint.files, frozenset(shadowed)))

    @property
    def tokenizer_arguments(self) -> dict[str, Any]:
        """Keyword arguments that make transformers load this checkpoint's tokenizer."""
        return {"pretrained_model_name_or_path": self.folder, "local_files_only": True}

    def adapt_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Complete a tokenizer that transformers has loaded; nothing for safetensors."""

    @property
    def config_origin(self) -> str:
        """Words for the origin of a config outside of the checkpoint, else ""."""
        return ""

    def read(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        empty: Callable[..., torch.Tensor] = torch.empty,
    ) -> torch.Tensor:
        """Read one of a checkpoint's tensors, dequantised and cast to a dtype.

        `name` is a key of `tensors`. A quantised tensor needs `dtype`; for others, None keeps the
        stored dtype. `empty(*shape, dtype=...)` allocates the result.
        """
        return read_tensor(self.files, name, self.tensors[name], dtype, empty)

    def read_stored(self, name: str) -> torch.Tensor:
        """Read one of a checkpoint's tensors as stored, not dequantised.

        `name` is its name in the file, a key of `stored`.
        """
        return read_tensor(self.files, name, self.stored[name])


def read_folder(folder: Path) -> Checkpoint:
    """Open a folder of safetensors files as a checkpoint, by reading only headers.

    Raises NotAModel if the folder has no config.json or no weights, UnsupportedModel if the weights
    are in a format that is not supported, CheckpointError if a file is missing or damaged.
    """
    config = read_config(folder)
    return Checkpoint.of_files(folder, config, *weight_files(folder))


def read_config(folder: Path) -> dict[str, Any]:
    """Read a model folder's config.json.

    Raises NotAModel if the file is missing, is not JSON, or has no `model_type`.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise NotAModel(f"{folder}: the folder has no config.json, so it holds no model")
    config = read_object(path, NotAModel).values
    if not isinstance(config.get("model_type"), str):
        raise NotAModel(f"{path}: has no model_type, so this file is not a model's config")
    if (modelopt := folder / MODELOPT).is_file() and settings_of(config) is None:
        details = read_object(modelopt, CheckpointError).values.get("quantization")
        config["quantization_config"] = {
            **(details if isinstance(details, dict) else {}),
            "quant_method": "modelopt",
        }
    return config


def weight_files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """List a folder's weight files, with a table from tensor to file name.

    The table comes from model.safetensors.index.json; it is empty if there is only
    model.safetensors.
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
            f"{index}: damaged: its weight_map cannot be read: {error}: download this file again"
        ) from error
    names = sorted({*file_of.values()})
    if not names:
        raise CheckpointError(
            f"{index}: damaged: its weight_map is empty: download this file again"
        )
    for name in names:
        if not name.isprintable() or len(name) > LONGEST_NAME:
            raise CheckpointError(
                f"{index}: damaged: {show_value(name)} is not a valid file name: download this"
                " file again"
            )
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(
                f"{index}: names the file {name!r}, outside the model's folder: download the"
                " model again"
            )
        if not name.endswith(".safetensors"):
            raise UnsupportedModel(
                f"{index}: names the file {name!r}, but Greenroom reads only .safetensors files:"
                " use a checkpoint that has them"
            )
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder / name}: this file is missing, though {INDEX} names it: download the"
                " model again"
            )
    return names, file_of


def _no_weights(folder: Path) -> Exception:
    """Return the error for a folder without model.safetensors and without a safetensors index."""
    if next(folder.glob("model-*.safetensors"), None):
        return CheckpointError(
            f"{folder / INDEX}: this file is missing, though the folder has weight files"
            " (model-*.safetensors): download the model again"
        )
    if gguf := next(iter(sorted(folder.glob("*.gguf"))), None):
        return NotAModel(
            f"{folder}: has no safetensors files; give the path of a GGUF file: {gguf}"
        )
    if pickle := next((p for pattern in PICKLES for p in sorted(folder.glob(pattern))), None):
        return UnsupportedModel(
            f"{folder}: the weights are in pickle files ({pickle.name}), but Greenroom reads only"
            " safetensors and GGUF: convert the model to safetensors"
        )
    return NotAModel(f"{folder}: the folder has no weights: neither {SINGLE} nor {INDEX}")
