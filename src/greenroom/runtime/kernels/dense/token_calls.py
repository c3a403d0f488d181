"""Kernel calls of a decoder layer for one token.

They are built once, and patched for every token.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor

from greenroom.runtime.kernels.dense.attention import KeyValueView, Positions
from greenroom.runtime.kernels.dense.stored import thread_scratch
from greenroom.runtime.kernels.launch.call_block import CallBlock

if TYPE_CHECKING:
    from greenroom.runtime.kernels.dense.decoder import FusedDecoderLayer

AHEAD = 256  # tokens beyond the first one's that calls have memory for
_local = threading.local()


class TokenCalls:
    """A decoder layer's kernel calls up to its choice of experts.

    They are for one thread and one KV cache.

    residual, state: the layer's results before its experts, like x and [1, hidden]
    shared: returns the output of its shared expert [1, hidden]; None if there is none
    """

    def __init__(
        self, layer: FusedDecoderLayer, x: Tensor, positions: Positions, view: KeyValueView
    ) -> None:
        """Build the kernel calls for tokens like x [1, 1, hidden]."""
        attention = layer.attention
        self._rotary = positions[0].shape[-1]
        # Weak references: the calls must not keep a finished request's cache in memory.
        self._views = ref(view.keys), ref(view.values)
        self._max_tokens = view.tokens + AHEAD
        self.residual = torch.empty_like(x)
        self.state = torch.empty(1, attention.hidden, dtype=x.dtype)
        self._work = _thread_work(layer.workspace(self._max_tokens))
        stages, self._choice = layer.stages_to_choice(
            x, positions, view, self.residual, self.state, self._work
        )
        self.shared = layer.shared_output(self.state)
        self._block = block = CallBlock(stages)
        self._stride = layer.stride(1)
        self._scratch = thread_scratch(self._stride) if self._stride else 0
        fields, index = layer.token_fields, block.index
        self._inputs = [
            [index(*field) for field in some] for some in (fields.x, fields.cos, fields.sin)
        ]
        rows = [(t.data_ptr(), t.stride(2) * t.itemsize) for t in (view.keys, view.values)]
        self._rows = [
            (index(*field), address - nbytes, nbytes)
            for (address, nbytes), some in zip(rows, (fields.key, fields.value), strict=True)
            for field in some
        ]
        self._tokens = [index(*field) for field in fields.tokens]
        self._chosen = index(len(stages) - 1, "chosen")

    def fits(self, positions: Positions, view: KeyValueView) -> bool:
        """Check that the addresses in the calls are valid for a token."""
        keys, values = self._views
        return (
            keys() is view.keys
            and values() is view.values
            and view.tokens <= self._max_tokens
            and self._work is _local.work
            and positions[0].shape[-1] == self._rotary
            and (not self._stride or thread_scratch(self._stride) == self._scratch)
        )

    def run(self, x: Tensor, positions: Positions, tokens: int) -> tuple[Tensor, Tensor]:
        """Compute the layer up to its choice; return (expert ids, gate weights), [1, top_k].

        The next token reuses their memory.
        """
        if self.shared is not None:
            self.shared.reset()
        arguments = self._block.reset()
        for indices, tensor in zip(self._inputs, (x, *positions), strict=True):
            address = tensor.data_ptr()
            for index in indices:
                arguments[index] = address
        for index, start, nbytes in self._rows:
            arguments[index] = start + tokens * nbytes
        for index in self._tokens:
            arguments[index] = tokens
        self._block.launch()
        if arguments[self._chosen]:
            return self._choice.ids, self._choice.weights
        return self._choice.choose_by_torch()


def _thread_work(like: Tensor) -> Tensor:
    """Return the calling thread's memory for attention, of at least the size of `like`."""
    memory: Tensor | None = getattr(_local, "work", None)
    if memory is None or memory.numel() < like.numel():
        memory = _local.work = like
    return memory
