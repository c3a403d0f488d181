"""One token's pass through all layers of a decoder as one CUDA graph.

A graph launches the same kernels with the same arguments again. So what differs between tokens is
in the device's memory: the token's id, its position, the number of tokens before it, and the
addresses of keys and values. Experts are found by the table of slots (`slot_table`), and the router
of each layer writes its choice to the host's memory, as in a pass without a graph.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from greenroom.errors import DeviceError
from greenroom.runtime.cuda.engine import Engine

PATIENCE = 1000  # looks at the reports before the device is asked whether it still works
Buffers = Sequence[tuple[Tensor, Tensor]]  # of each layer: its tensors of keys and of values
# Makes the launches of a layer's experts, which report to a part of the host's memory: [top_k].
MakeLaunches = Callable[[Tensor], Any]

_active = threading.local()


class NoGraph(Exception):
    """A token's pass cannot be a graph."""


def active_graph() -> TokenGraph | None:
    """Return the graph whose pass the calling thread computes or captures now, or None."""
    graph: TokenGraph | None = getattr(_active, "graph", None)
    return graph


class TokenGraph:
    """The pass of one token, of one thread.

    ids, positions: [1, 1] int64, the token and its position in the rotary embedding
    before:         [1] int64, the number of tokens before it, whose keys and values are stored
    fields:         [layers, 4] int64, see `attend_in_place`
    room:           the most tokens that a KV cache can have
    cache:          what the decoder's layers get as their KV cache
    shapes:         of each layer: key heads, and widths of keys and of values, in `fields`
    """

    def __init__(
        self,
        engine: Engine,
        layers: int,
        moe_layers: int,
        top_k: int,
        room: int,
        hidden: Tensor,
        cache: Any,
    ) -> None:
        """Allocate what the pass reads and writes.

        layers: the decoder's layers, each with keys and values; `moe_layers` have experts
        hidden: a tensor like the pass's result, [1, 1, H]
        """
        self._engine, self.room, self.cache, device = engine, room, cache, hidden.device
        with torch.inference_mode(False):
            self.ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
            self._numbers = torch.zeros(2, dtype=torch.int64, device=device)
            self.before, self.positions = self._numbers[:1], self._numbers[1:].view(1, 1)
            self.fields = torch.zeros(layers, 4, dtype=torch.int64, device=device)
            self._hidden = torch.zeros_like(hidden)
            self._reports = engine.host_numbers(moe_layers * top_k)
            self._full = engine.host_numbers(1)  # 1: the mask has all tokens
        self._report = self._reports.numpy().reshape(moe_layers, top_k)
        self._top_k, self._number, self._has_mask = top_k, 0, False
        self.shapes: list[tuple[int, int, int]] = []
        self._keys: list[weakref.ref[Tensor]] = []  # those of which `fields` has the addresses
        self._launches: dict[int, Any] = {}  # of each MoE layer's experts
        self.moe_layers: list[int] = []  # in the order of their launches
        self._replay: Callable[[], None] | None = None
        self._counts_agree = True  # of look-ups here and on the device

    def set_inputs(
        self,
        ids: Tensor,
        positions: Tensor | None,
        mask: Tensor | None,
        before: int,
        buffers: Buffers,
    ) -> None:
        """Set the next token: its id and position [1, 1], its mask of padding, its KV cache.

        Without `positions` the position is `before`, the number of tokens before this one.
        """
        same = len(self._keys) == len(buffers)
        for reference, (keys, _) in zip(self._keys, buffers, strict=False):
            same &= reference() is keys
        if not same:
            rows = [
                [keys.data_ptr(), values.data_ptr(), keys.stride(1), values.stride(1)]
                for keys, values in buffers
            ]
            self.fields.copy_(self._engine.copy_to_device(torch.tensor(rows)))
            self._keys = [weakref.ref(keys) for keys, _ in buffers]
            self.shapes = [
                (keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in buffers
            ]
        self.ids.copy_(ids)
        self._numbers.fill_(before)
        if positions is not None:
            self.positions.copy_(positions)
        self._has_mask = mask is not None
        if mask is not None:  # there before the pass reports, so nothing waits for it
            self._full.copy_(mask.all().to(torch.int64).view(1), non_blocking=True)

    @property
    def mask_is_full(self) -> bool:
        """Tell, once the pass has reported, whether the mask of padding has all tokens."""
        return not self._has_mask or bool(self._full.numpy()[0])

    def launch_experts(
        self, layer: int, make: MakeLaunches, x: Tensor, index: Tensor, weights: Tensor
    ) -> Tensor:
        """Launch one MoE layer's experts within the pass; return their sum [1, H].

        `make` makes the layer's launches; the other arguments are those of `TokenLaunches.start`.
        """
        if layer not in self._launches:
            first = len(self._launches) * self._top_k
            self._launches[layer] = make(self._reports[first : first + self._top_k])
            self.moe_layers.append(layer)
        result: Tensor = self._launches[layer].run(x, index, weights)
        return result

    def compute(self, decode: Callable[[], Tensor]) -> Tensor:
        """Compute the pass by `decode`, kernel by kernel; return a copy of its result."""
        self._look_up_by(lambda: self._run(decode))
        with self._in_order():
            return self._hidden.clone()

    def replay(self, decode: Callable[[], Tensor]) -> Tensor:
        """Launch the pass as a graph, captured from `decode` at the first call.

        `compute` was called before, so that all kernels are compiled. Returns a copy of the result.
        Raises NoGraph if the pass cannot be captured.
        """
        with self._in_order():  # the table's lock first, then that of captures, as for a layer
            if self._replay is None:
                self._replay = self._capture(decode)
            self._look_up_by(self._replay)
            return self._hidden.clone()

    def _capture(self, decode: Callable[[], Tensor]) -> Callable[[], None]:
        """Capture the pass; return a function that launches the graph."""

        def run() -> None:
            self._run(decode)

        replay = self._engine.capture(run)
        if replay is run and self._engine.makes_graphs:
            raise NoGraph("the pass could not be captured")
        return replay

    def _in_order(self) -> AbstractContextManager[None]:
        """Return a context in which launches are in order with changes of the table of slots."""
        context: AbstractContextManager[None] = self._launches[self.moe_layers[0]].in_order()
        return context

    def _look_up_by(self, launch: Callable[[], None]) -> None:
        """Launch a pass, with a look-up in each MoE layer, and count it.

        After an exception here, such as an interrupt, the device's counts may differ from this one.
        """
        if not self._counts_agree:
            for each in self._launches.values():
                each.set_count(self._number)
        self._counts_agree, self._number = False, self._number + 1
        launch()
        self._counts_agree = True

    def _run(self, decode: Callable[[], Tensor]) -> None:
        with self._activated():
            self._hidden.copy_(decode())

    @contextmanager
    def _activated(self) -> Iterator[None]:
        _active.graph = self
        try:
            yield
        finally:
            _active.graph = None

    def read_reports(self) -> NDArray[np.int64]:
        """Wait for the reports of the last pass: [MoE layers, top_k], in the order of launches.

        Each is twice the expert's number, plus 1 if the expert was in a slot. Raises DeviceError
        if the device has done all work without a report.
        """
        looks, number, stream = 0, self._number << 32, self._engine.current_stream()
        while (report := self._report - number).min() < 0:  # reports of passes before are less
            looks += 1
            idle = looks % PATIENCE == 0 and self._engine.is_idle(stream)
            if idle and (self._report - number).min() < 0:
                raise DeviceError("the GPU failed: it has not reported a token's experts")
            time.sleep(0)  # threads that move experts need Python's lock
        return report
