"""KV cache layers whose keys and values are quantised, and read where they lie.

A layer stores rows of bytes (`runtime/kernels/dense/kv_rows.py`), which grow in place. The compiled
attention of a decode step reads and writes the rows themselves. Every other attention gets keys and
values that are decoded for this call: of a prompt's block, those of its whole context. New keys and
values are quantised first, so what a token attends to does not depend on how a prompt was cut.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from greenroom.hf.kv.cache import ROOM, GrowingLayer
from greenroom.runtime.graphs import outside_graphs
from greenroom.runtime.kernels.dense.kv_rows import KeyValueFormat


class QuantisedLayer(GrowingLayer):
    """KV cache layer that stores quantised keys and values, without a copy as it grows.

    `keys` and `values` are the rows of bytes, uint8 [batch, heads, tokens, bytes].
    """

    def __init__(self, form: KeyValueFormat, room: int = ROOM, in_blocks: bool = False) -> None:
        """Make an empty KV cache layer of a format; for the others see `GrowingLayer`."""
        super().__init__(room, in_blocks)
        self.form, self.format_number = form, form.number

    @classmethod
    def replacing(
        cls, form: KeyValueFormat, layer: DynamicLayer, room: int, in_blocks: bool
    ) -> QuantisedLayer:
        """Make a quantised KV cache layer with the tokens of a plain one."""
        quantised = cls(form, room, in_blocks)
        if layer.get_seq_length():
            quantised.update(layer.keys, layer.values)
        return quantised

    @outside_graphs
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values [batch, heads, new tokens, width] to a KV cache layer.

        Returns the keys and values of all tokens, decoded to the type of the new ones.
        """
        states, new = (key_states, value_states), key_states.shape[2]
        rows = self.extend(new, *map(partial(_no_rows, self.form), states))
        for all_rows, state in zip(rows, states, strict=True):
            self.form.pack(state, all_rows[:, :, all_rows.shape[2] - new :])
        keys, values = (
            self.form.expand(all_rows, state.shape[-1], state.dtype)
            for all_rows, state in zip(rows, states, strict=True)
        )
        return keys, values


def _no_rows(form: KeyValueFormat, state: Tensor) -> Tensor:
    """Return rows of keys or values, [batch, heads, 0, bytes]."""
    batch, heads, _, width = state.shape
    return state.new_empty((batch, heads, 0, form.row_bytes(width)), dtype=torch.uint8)
