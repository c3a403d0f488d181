"""Find the order of rows and blocks in matrices that llama.cpp's converter changed.

llama.cpp's converter changes some matrices only in their order: it moves rows, or columns in groups
of whole blocks. Such a matrix can stay quantised, since its bytes can be put back in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import Concatenate, ConversionOps
from transformers.integrations.gguf.gguf_conversion_mapping import (
    TiledToGroupedInputs,
    TiledToGroupedRows,
)

from greenroom.core.layout import BLOCKS
from greenroom.hf.checkpoint.header import StoredTensor
from greenroom.hf.index.conversions import WeightConversion
from greenroom.hf.index.gguf.values import JoinByKeyHead, JoinKeysAndValues, UnpermuteRows

# Operations that only move rows -> the axis of the inputs of each of their tensors; the other axes
# are rows.
INPUT_AXES: dict[type[ConversionOps], tuple[int, ...]] = {
    UnpermuteRows: (-1,),
    TiledToGroupedRows: (-1,),
    JoinByKeyHead: (-1, -1),
    JoinKeysAndValues: (-2, -1),
}


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The rows of a matrix that the rows of stored tensors are.

    places: for each tensor, the row in the matrix of each stored row
    axes:   for each tensor, the axis of the inputs; -1 if its rows can be moved as bytes
    """

    places: tuple[Tensor, ...]
    axes: tuple[int, ...]


@dataclass
class OrderFinder:
    """Finder of the order of matrices of one model; equal layers share one result."""

    model: Any

    def __post_init__(self) -> None:
        self._orders: dict[Any, Any] = {}

    def rows(self, conversion: WeightConversion, stored: Sequence[StoredTensor]) -> RowOrder | None:
        """Find where a conversion puts the rows of its quantised tensors.

        `stored` are the tensors of `conversion.sources`, in their order. None if the conversion
        does more than move rows.
        """
        key = id(conversion.converter), "rows", *(each.shape for each in stored)
        if key not in self._orders:
            self._orders[key] = self._rows(conversion, stored)
        order: RowOrder | None = self._orders[key]
        return order

    def blocks(self, conversion: WeightConversion, stored: StoredTensor) -> Tensor | None:
        """Find the order in which a conversion moves whole blocks of all rows.

        Returns the stored block of each block; None if the conversion does anything else.
        """
        key = id(conversion.converter), stored.encoding, stored.shape
        if key not in self._orders:
            self._orders[key] = self._blocks(conversion, stored)
        blocks: Tensor | None = self._orders[key]
        return blocks

    def _rows(
        self, conversion: WeightConversion, stored: Sequence[StoredTensor]
    ) -> RowOrder | None:
        operations = conversion.operations
        axes = _input_axes(operations[0], len(stored))
        if len(operations) > 1 or axes is None:
            return None
        numbers, end = [], 0
        for each, axis in zip(stored, axes, strict=True):
            rows = list(each.shape)
            rows[axis] = 1
            numbers.append(torch.arange(end, end + prod(rows)).view(rows))
            end += prod(rows)
        places = self._convert(conversion, numbers)[:, 0].argsort()
        return RowOrder(places.split([each.numel() for each in numbers]), axes)

    def _blocks(self, conversion: WeightConversion, stored: StoredTensor) -> Tensor | None:
        if [type(each) for each in conversion.operations] != [TiledToGroupedInputs]:
            return None
        width, _ = BLOCKS[stored.encoding]
        (sources,) = self._convert(conversion, [torch.arange(stored.shape[1])[None]])
        blocks = sources.view(-1, width)[:, 0] // width
        moved = (blocks[:, None] * width + torch.arange(width)).flatten()
        return blocks if torch.equal(sources, moved) else None

    def _convert(self, conversion: WeightConversion, numbers: Sequence[Tensor]) -> Tensor:
        names = [name for group in conversion.sources.values() for name in group]
        tensors = dict(zip(names, numbers, strict=True))
        return conversion.convert(tensors, self.model, self.model.config)[conversion.targets[0]]


def _input_axes(operation: ConversionOps, tensors: int) -> tuple[int, ...] | None:
    if type(operation) is Concatenate and operation.dim == 0:
        return (-1,) * tensors
    return INPUT_AXES.get(type(operation))
