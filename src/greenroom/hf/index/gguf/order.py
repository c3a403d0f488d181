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
from transformers.core_model_loading import Concatenate
from transformers.integrations.gguf.gguf_conversion_mapping import (
    TiledToGroupedInputs,
    TiledToGroupedRows,
)

from greenroom.core.layout import BLOCKS
from greenroom.hf.checkpoint.header import StoredTensor
from greenroom.hf.index.conversions import WeightConversion
from greenroom.hf.index.gguf.values import JoinByKeyHead, UnpermuteRows

# Operations that only move rows, as does joining tensors along the first axis.
MOVES_ROWS = (UnpermuteRows, TiledToGroupedRows, JoinByKeyHead)


@dataclass
class OrderFinder:
    """Finder of the order of matrices of one model; equal layers share one result."""

    model: Any

    def __post_init__(self) -> None:
        self._orders: dict[Any, Any] = {}

    def rows(
        self, conversion: WeightConversion, stored: Sequence[StoredTensor]
    ) -> tuple[Tensor, ...] | None:
        """Find where a conversion puts the rows of its quantised tensors.

        `stored` are the tensors of `conversion.sources`, in their order. For each of them, returns
        the row in the matrix of each stored row. None if the conversion does more than move rows.
        """
        key = id(conversion.converter), "rows", *(each.shape for each in stored)
        if key not in self._orders:
            self._orders[key] = self._rows(conversion, stored)
        places: tuple[Tensor, ...] | None = self._orders[key]
        return places

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
    ) -> tuple[Tensor, ...] | None:
        operation, *more = conversion.operations
        joins = type(operation) is Concatenate and operation.dim == 0
        if more or not (joins or type(operation) in MOVES_ROWS):
            return None
        counts = [prod(each.shape[:-1]) for each in stored]
        numbers = torch.arange(sum(counts)).split(counts)
        shaped = [n.view(*each.shape[:-1], 1) for n, each in zip(numbers, stored, strict=True)]
        return self._convert(conversion, shaped)[:, 0].argsort().split(counts)

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
