"""Find and read the weight matrices, other than experts, that stay quantised in memory.

They are the weights of plain linear layers and embeddings whose encoding (fp8, GGUF, ...) a
compiled kernel can read. A weight is excluded if the model's code uses it outside of the layer, by
an expression such as `x.weight`.
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

_ROUTERS = {"gate", "router"}  # routers stay torch layers: they decide which experts are chosen


@dataclass(frozen=True, slots=True)
class EncodedParameter:
    """A weight matrix that stays quantised in memory.

    modules: names of the linear layers and embeddings that share the matrix
    tensor:  name of the checkpoint's tensor
    stored:  layout of the matrix in memory
    """

    modules: tuple[str, ...]
    tensor: str
    stored: StoredMatrix

    def detach(self, model: PreTrainedModel) -> None:
        """Remove the `weight` parameter of the modules, and attach the quantised matrix to them.

        The attribute `weight` of each module becomes None.
        """
        for name in self.modules:
            module = model.get_submodule(name)
            attach_matrix(module, self.stored)
            module._is_hf_initialized = True  # or transformers would initialise the detached weight

    def load(self, checkpoint: Checkpoint, empty: Callable[..., torch.Tensor]) -> None:
        """Read the quantised matrix from the checkpoint into memory.

        `empty` allocates the memory, like `torch.empty`. Raises CheckpointError if reading fails.
        """
        parts = self.stored.allocate(empty)
        read_parts(checkpoint.files, self.tensor, checkpoint.tensors[self.tensor], parts)


def find_encoded_parameters(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    conversions: dict[str, WeightConversion],
    dtype: torch.dtype,
) -> dict[str, EncodedParameter]:
    """Find the weight matrices, other than experts, that can stay quantised in memory.

    The model is on the meta device, and computes in `dtype`. `conversions` say from which tensors
    each parameter is made. Returns matrices by parameter name.
    """
    encoded: dict[str, EncodedParameter] = {}
    tied = dict(model.all_tied_weights_keys)
    used = _used_by_code(model)
    for target, conversion in conversions.items():
        names = [name for group in conversion.sources.values() for name in group]
        if conversion.converter is not None or len(names) != 1:
            continue
        group = _tied_parameters(target, tied)
        if not all(_is_used_by_layer_only(model, name, used) for name in group):
            continue
        stored = _stored(checkpoint.tensors[names[0]], dtype)
        if stored is not None and not stored.unsupported_reason:
            modules = tuple(name.rpartition(".")[0] for name in group)
            encoded[target] = EncodedParameter(modules, names[0], stored)
    return encoded


def _tied_parameters(target: str, tied: dict[str, str]) -> list[str]:
    """Return the names of a parameter and of the parameters tied to it."""
    source = tied.get(target, target)
    others = {name for name, other in tied.items() if other == source} | {source}
    return [target, *sorted(others - {target})]


def _is_used_by_layer_only(model: PreTrainedModel, name: str, used: set[str]) -> bool:
    """Check that a parameter is the weight of a layer, and that no other code uses it."""
    path = name.split(".")
    if path[-1] != "weight" or len(path) < 2 or path[-2] in used or _ROUTERS & set(path):
        return False
    module = model.get_submodule(name.rpartition(".")[0])
    if type(module) is nn.Embedding:
        return module.max_norm is None and module.weight.dtype is model.dtype
    return type(module) is nn.Linear and module.weight.dtype is model.dtype


def _used_by_code(model: PreTrainedModel) -> set[str]:
    """Find names of submodules whose `weight` the model's code uses, as in `self.head.weight`."""
    modules = {type(module).__module__ for module in model.modules()}
    used: set[str] = set()
    for name in sorted(modules):
        if name.startswith("transformers.models."):
            source = inspect.getsource(sys.modules[name])
            used.update(re.findall(r"(?<![\"\w.])\w+(?:\.\w+)*\.(\w+)\.weight\b", source))
    return used


def _stored(tensor: StoredTensor, dtype: torch.dtype) -> StoredMatrix | None:
    """Return the layout of a quantised matrix in memory; None if it must be dequantised."""
    encoding = ENCODINGS.get(tensor.encoding)
    if tensor.encoding == PLAIN or encoding is None or len(tensor.shape) != 2 or tensor.transposed:
        return None
    if tensor.codes[0] % tensor.unit:  # the last row of scales covers fewer outputs
        return None
    sizes = [("weight", tensor.codes, tensor.dtype)]
    for kind, companion in zip(encoding.companions, tensor.companions, strict=True):
        sizes.append((f"weight.{kind}", companion.shape, encoding.dtype(kind, companion.dtype)))
    layout = SlotLayout.pack(sizes, {"weight": tensor.encoding}, str(dtype)[6:])
    stored = StoredMatrix(layout, dtype)
    return stored if stored.shape == tensor.shape else None
