"""Which dense matrices stay as the checkpoint stores them, and how they are read.

Those of plain linear layers and embeddings, where a compiled product reads their encoding, and
where the model's code leaves them to the layer: what mentions `x.weight` computes with it itself.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from greenroom.core.layout import PLAIN, SlotLayout
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.header import StoredTensor
from greenroom.hf.checkpoint.read import read_parts
from greenroom.hf.index.conversions import WeightConversion
from greenroom.runtime.encodings import ENCODINGS
from greenroom.runtime.kernels.dense.stored import StoredMatrix, attach_matrix

_ROUTERS = {"gate", "router"}  # which experts are chosen is torch's to compute


@dataclass(frozen=True, slots=True)
class EncodedParameter:
    """A matrix that stays as stored: the modules that share it, and the checkpoint's name of it."""

    modules: tuple[str, ...]
    tensor: str
    stored: StoredMatrix

    def take_out(self, model: PreTrainedModel) -> None:
        """Take the parameters out of the modules; their places stay, as None."""
        for name in self.modules:
            module = model.get_submodule(name)
            attach_matrix(module, self.stored)
            module._is_hf_initialized = True  # or it would be, and there is nothing to do it to

    def load(self, checkpoint: Checkpoint, empty: Callable[..., torch.Tensor]) -> None:
        """Read it into memory from `empty`. Raises CheckpointError."""
        parts = self.stored.fill(empty)
        read_parts(checkpoint.files, self.tensor, checkpoint.tensors[self.tensor], parts)


def find_encoded_parameters(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    conversions: dict[str, WeightConversion],
    dtype: torch.dtype,
) -> dict[str, EncodedParameter]:
    """By parameter, what can stay as stored of a model on the meta device in `dtype`.

    `conversions` are those to the dense parameters.
    """
    found: dict[str, EncodedParameter] = {}
    tied = dict(model.all_tied_weights_keys)
    used = _used_by_code(model)
    for target, conversion in conversions.items():
        names = [name for own in conversion.sources.values() for name in own]
        if conversion.converter is not None or len(names) != 1:
            continue
        group = _group(target, tied)
        if not all(_is_left_to_its_layer(model, name, used) for name in group):
            continue
        stored = _stored(checkpoint.tensors[names[0]], dtype)
        if stored is not None and not stored.unsupported_reason:
            modules = tuple(name.rpartition(".")[0] for name in group)
            found[target] = EncodedParameter(modules, names[0], stored)
    return found


def _group(target: str, tied: dict[str, str]) -> list[str]:
    """A parameter and those that are tied to it."""
    source = tied.get(target, target)
    others = {name for name, other in tied.items() if other == source} | {source}
    return [target, *sorted(others - {target})]


def _is_left_to_its_layer(model: PreTrainedModel, name: str, used: set[str]) -> bool:
    """Is a parameter the weight of a linear layer or an embedding, which alone computes with it?"""
    path = name.split(".")
    if path[-1] != "weight" or len(path) < 2 or path[-2] in used or _ROUTERS & set(path):
        return False
    module = model.get_submodule(name.rpartition(".")[0])
    if type(module) is nn.Embedding:
        return module.max_norm is None and module.weight.dtype is model.dtype
    return type(module) is nn.Linear and module.weight.dtype is model.dtype


def _used_by_code(model: PreTrainedModel) -> set[str]:
    """Names x of which a model's own code says `.x.weight`."""
    modules = {type(module).__module__ for module in model.modules()}
    found: set[str] = set()
    for name in sorted(modules):
        if name.startswith("transformers.models."):
            source = inspect.getsource(sys.modules[name])
            found.update(re.findall(r"(?<![\"\w.])\w+(?:\.\w+)*\.(\w+)\.weight\b", source))
    return found


def _stored(tensor: StoredTensor, dtype: torch.dtype) -> StoredMatrix | None:
    """Where a matrix would lie in memory; None of what is no encoded matrix."""
    encoding = ENCODINGS.get(tensor.encoding)
    if tensor.encoding == PLAIN or encoding is None or len(tensor.shape) != 2 or tensor.transposed:
        return None
    if tensor.codes[0] % tensor.unit:  # the last row of scales is for fewer outputs
        return None
    sizes = [("weight", tensor.codes, tensor.dtype)]
    for kind, companion in zip(encoding.companions, tensor.companions, strict=True):
        made = "float32" if tensor.encoding == "fp8" else companion.dtype
        sizes.append((f"weight.{kind}", companion.shape, made))
    layout = SlotLayout.pack(sizes, {"weight": tensor.encoding}, str(dtype)[6:])
    stored = StoredMatrix(layout, dtype)
    return stored if stored.shape == tensor.shape else None
