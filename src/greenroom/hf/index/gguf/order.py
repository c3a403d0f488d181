"""Find the order of rows and blocks in matrices that llama.cpp's converter changed.

llama.cpp's converter changes some matrices only in their order: it moves rows, or columns in groups
of whole blocks. Such a matrix can stay quantised, since its bytes can be put back in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from greenroom.hf.checkpoint.read import BlockOrder
from greenroom.hf.index.conversions import WeightConversion
from greenroom.hf.index.gguf.values import JoinByKeyHead, UnpermuteRows
from greenroom.runtime.encodings import ENCODINGS

MOVE_ROWS = (UnpermuteRows, TiledToGroupedRows, JoinByKeyHead)


@dataclass
class OrderFinder:
    """Finder of the order of matrices of one model; equal layers share one result."""

    model: Any

    def __post_init__(self) -> None:
        self._orders: dict[Any, BlockOrder | None] = {}

    def find(
        self, conversion: WeightConversion, stored: Sequence[StoredTensor]
    ) -> BlockOrder | None:
        """Find the order in which a conversion puts the bytes of its quantised tensors.

        `stored` are the tensors of `conversion.sources`, in their order. None if the conversion
        does more than move rows and blocks, or if the tensors are no matrices of one encoding
        without scales in other tensors.
        """
        kinds = {(each.encoding, each.codes[1:]) for each in stored}
        if len(kinds) > 1 or stored[0].encoding not in ENCODINGS:
            return None
        if any(len(each.shape) != 2 or each.companions for each in stored):
            return None
        key = id(conversion.converter), *((each.encoding, each.shape) for each in stored)
        if key not in self._orders:
            self._orders[key] = self._find(conversion, stored)
        return self._orders[key]

    def _find(
        self, conversion: WeightConversion, stored: Sequence[StoredTensor]
    ) -> BlockOrder | None:
        operations, columns = conversion.operations, stored[0].shape[1]
        rows = sum(each.shape[0] for each in stored)
        if all(map(_moves_rows, operations)):
            numbers = torch.arange(rows).split([each.shape[0] for each in stored])
            sources = self._convert(conversion, [part[:, None] for part in numbers])
            return BlockOrder(sources[:, 0].argsort(), None)
        if len(stored) == 1 and all(type(each) is TiledToGroupedInputs for each in operations):
            width, _ = BLOCKS[stored[0].encoding]
            (sources,) = self._convert(conversion, [torch.arange(columns)[None]])
            blocks = sources.view(-1, width)[:, 0] // width
            if torch.equal(sources, (blocks[:, None] * width + torch.arange(width)).flatten()):
                return BlockOrder(torch.arange(rows), blocks)
        return None

    def _convert(self, conversion: WeightConversion, numbers: Sequence[Tensor]) -> Tensor:
        names = [name for group in conversion.sources.values() for name in group]
        tensors = dict(zip(names, numbers, strict=True))
        return conversion.convert(tensors, self.model, self.model.config)[conversion.targets[0]]


def _moves_rows(operation: ConversionOps) -> bool:
    return type(operation) in MOVE_ROWS or (type(operation) is Concatenate and operation.dim == 0)
