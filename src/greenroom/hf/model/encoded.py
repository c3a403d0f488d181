"""Weight matrices, other than experts, that stay quantised in memory.

Some of them are stored in another order of rows or of blocks in each row, or in several tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import nn
from transformers import PreTrainedModel

from greenroom.core.layout import PLAIN, SlotLayout
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.header import StoredTensor
from greenroom.hf.checkpoint.read import BlockOrder, read_moved, read_parts
from greenroom.hf.index.conversions import WeightConversion
from greenroom.hf.index.gguf.order import OrderFinder
from greenroom.runtime.encodings import ENCODINGS
from greenroom.runtime.kernels.dense.stored import JoinedMatrix, StoredMatrix, attach_matrix

# Layers that are dequantised. transformers caches the inputs of this one, of latent attention, and
# multiplies all of them again for each token: a kept matrix would be decoded each time.
DEQUANTISED_LAYERS = (".kv_b_proj",)


@dataclass(frozen=True, slots=True)
class EncodedParameter:
    """A weight matrix that stays quantised in memory.

    modules: names of the linear layers and embeddings that share the matrix
    tensors: names of the checkpoint's tensors; several have some of the rows each
    stored:  layout of the matrix in memory
    orders:  order of each tensor's rows and blocks in memory; () for one tensor in its own order
    """

    modules: tuple[str, ...]
    tensors: tuple[str, ...]
    stored: StoredMatrix
    orders: tuple[BlockOrder, ...] = ()

    def detach(self, model: PreTrainedModel) -> None:
        """Remove the `weight` parameter of the modules, and attach the quantised matrix to them.

        The attribute `weight` of each module becomes None.
        """
        _attach(model, self.modules, self.stored)

    def load(self, checkpoint: Checkpoint, empty: Callable[..., torch.Tensor]) -> None:
        """Read the quantised matrix from the checkpoint into memory.

        `empty` allocates the memory, like `torch.empty`. Raises CheckpointError if reading fails.
        """
        parts, files = self.stored.allocate(empty), checkpoint.files
        if not self.orders:
            (name,) = self.tensors
            read_parts(files, name, checkpoint.tensors[name], parts)
        for name, order in zip(self.tensors, self.orders, strict=bool(self.orders)):
            read_moved(files, name, checkpoint.tensors[name], order, parts[0])


@dataclass(frozen=True, slots=True)
class JoinedParameter:
    """A weight matrix in several parts, of which at least one stays quantised in memory.

    modules: names of the linear layers that share the matrix
    tensors: name of the checkpoint's tensor of each part
    stored:  layout of the parts in memory
    """

    modules: tuple[str, ...]
    tensors: tuple[str, ...]
    stored: JoinedMatrix

    def detach(self, model: PreTrainedModel) -> None:
        """Remove the `weight` parameter of the modules, and attach the parts to them."""
        _attach(model, self.modules, self.stored)

    def load(self, checkpoint: Checkpoint, empty: Callable[..., torch.Tensor]) -> None:
        """Read the parts into memory; those that are not quantised are converted as the model's.

        `empty` allocates the memory, like `torch.empty`. Raises CheckpointError if reading fails.
        """
        for number, name in enumerate(self.tensors):
            part = self.stored.parts[number]
            if isinstance(part, StoredMatrix):
                rows = _as_rows(checkpoint.tensors[name])
                read_parts(checkpoint.files, name, rows, part.allocate(empty))
                continue
            # As in transformers, conversions compute in float32, and the result is cast.
            values = checkpoint.read(name, torch.float32).flatten(0, -2)
            self.stored.parts[number] = empty(*part.shape, dtype=part.dtype).copy_(values)


def _attach(
    model: PreTrainedModel, modules: tuple[str, ...], stored: StoredMatrix | JoinedMatrix
) -> None:
    for name in modules:
        module = model.get_submodule(name)
        attach_matrix(module, stored)
        module._is_hf_initialized = True  # or transformers would initialise the detached weight


def encoded_parameter(
    modules: Mapping[str, nn.Module],
    conversion: WeightConversion,
    tensors: Sequence[StoredTensor],
    orders: OrderFinder,
    dtype: torch.dtype,
) -> EncodedParameter | JoinedParameter | None:
    """Describe a weight that stays quantised; None if it must be dequantised.

    modules:    the modules that share the weight, by name
    conversion: how the weight is made from checkpoint tensors, which are `tensors`
    dtype:      the dtype in which the model computes
    """
    names = tuple(name for group in conversion.sources.values() for name in group)
    if any(name.endswith(DEQUANTISED_LAYERS) for name in modules):
        return None
    if conversion.converter is None:
        stored = encoded_matrix(tensors[0], dtype)
        return None if stored is None else EncodedParameter(tuple(modules), names, stored)
    if len(conversion.targets) > 1 or any(tensor.companions for tensor in tensors):
        return None
    if (places := orders.rows(conversion, tensors)) is not None:
        return _of_rows(modules, names, tensors, places, dtype)
    stored = encoded_matrix(tensors[0], dtype) if len(tensors) == 1 else None
    if stored is None or (blocks := orders.blocks(conversion, tensors[0])) is None:
        return None
    moved = BlockOrder(torch.arange(tensors[0].shape[0]), blocks)
    return EncodedParameter(tuple(modules), names, stored, (moved,))


def _of_rows(
    modules: Mapping[str, nn.Module],
    names: tuple[str, ...],
    tensors: Sequence[StoredTensor],
    places: tuple[torch.Tensor, ...],
    dtype: torch.dtype,
) -> EncodedParameter | JoinedParameter | None:
    """Describe a weight that has the rows of some tensors in another order.

    `places` are the rows in the weight of each tensor's rows.
    """
    first = tensors[0]
    if first.encoding != PLAIN and len({(each.encoding, each.shape[1:]) for each in tensors}) == 1:
        rows, columns = sum(map(len, places)), first.shape[-1]
        joined = replace(first, shape=(rows, columns), codes=(rows, first.codes[-1]))
        if (stored := encoded_matrix(joined, dtype)) is None:
            return None
        return EncodedParameter(tuple(modules), names, stored, tuple(map(BlockOrder, places)))
    if any(type(each) is not nn.Linear or each.bias is not None for each in modules.values()):
        return None
    parts: list[StoredMatrix | torch.Tensor] = []
    for tensor, rows_of in zip(tensors, places, strict=True):
        matrix, size = encoded_matrix(_as_rows(tensor), dtype), (len(rows_of), tensor.shape[-1])
        parts.append(torch.empty(size, dtype=dtype, device="meta") if matrix is None else matrix)
    if not any(isinstance(part, StoredMatrix) for part in parts):
        return None
    return JoinedParameter(tuple(modules), names, JoinedMatrix(parts, places))


def _as_rows(tensor: StoredTensor) -> StoredTensor:
    """Return a stored stack of matrices as one matrix of all their rows."""
    if tensor.encoding == PLAIN:
        return tensor
    rows = prod(tensor.shape[:-1])
    return replace(tensor, shape=(rows, tensor.shape[-1]), codes=(rows, tensor.codes[-1]))


def encoded_matrix(tensor: StoredTensor, dtype: torch.dtype) -> StoredMatrix | None:
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
    fits = stored.shape == tensor.shape and not stored.unsupported_reason
    return stored if fits else None
