"""One token's pass through all layers of a decoder as one CUDA graph.

A graph launches the same kernels with the same arguments again. So what differs between tokens is
in the device's memory: the token's id, its position, the number of tokens before it, and the
addresses of keys and values. Experts are found by the table of slots (`slot_table`), and the router
of each layer writes its choice to the host's memory, as in a pass without a graph.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.kernels.report import wait_for_report

# Makes the launches of a layer's experts, which report to a part of the host's memory: [top_k].
MakeLaunches = Callable[[Tensor], Any]

_active = threading.local()


class LayerStates(NamedTuple):
    """Tensors of a KV cache layer's keys and values, [1, heads, rows, width] each.

    dropped: tokens before the one whose row is the first
    window:  the most tokens that attention is to; None: all
    """

    keys: Tensor
    values: Tensor
    dropped: int = 0
    window: int | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the number of key heads, and the widths of keys and values."""
        return self.keys.shape[1], self.keys.shape[3], self.values.shape[3]

    @property
    def room(self) -> int:
        """Return how many tokens have a row, or had one."""
        return self.dropped + min(self.keys.shape[2], self.values.shape[2])

    def fields(self) -> list[int]:
        """Return the numbers that `attend_in_place` reads."""
        before = (self.dropped * x.stride(2) * x.itemsize for x in self[:2])
        first = (x.data_ptr() - n for x, n in zip(self[:2], before, strict=True))
        return [*first, self.keys.stride(1), self.values.stride(1)]


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
    shapes:         of each layer in `fields`: key heads, widths of keys and of values, the window
    stamps:         the KV cache layers' stamps, with the tensors of `fields`
    until:          tokens that these tensors have room for
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
        self._all_reports, self._combined_reports = self._reports.numpy(), 0
        # The lower half of each report: twice the expert, plus 1 if it was in a slot.
        halves = self._all_reports.view(np.int32).reshape(moe_layers, top_k, 2)
        self._choices = halves[..., int(sys.byteorder == "big")]
        self._top_k, self._number, self._has_mask = top_k, 0, False
        self.shapes: list[tuple[tuple[int, int, int], int | None]] = []
        self.stamps, self.until = list[int](), 0
        self._launches: dict[int, Any] = {}  # of each MoE layer's experts
        self.moe_layers: list[int] = []  # in the order of their launches
        self._replay: Callable[[], None] | None = None
        self._counts_agree = True  # of look-ups here and on the device

    def set_cache(self, stamps: list[int], states: Sequence[LayerStates]) -> None:
        """Set where the KV cache of the next tokens is; `stamps` are those of its layers."""
        self.stamps = []  # in case of an interrupt
        numbers = torch.tensor([layer.fields() for layer in states])
        self.fields.copy_(self._engine.copy_to_device(numbers))
        self.shapes = [(layer.shape, layer.window) for layer in states]
        self.until, self.stamps = min(layer.room for layer in states), stamps

    def room_of(self, layer: int) -> int:
        """Return the most tokens that attention of a layer is to."""
        window = self.shapes[layer][1]
        return self.room if window is None else min(self.room, window)

    def set_inputs(
        self, ids: Tensor, positions: Tensor | None, mask: Tensor | None, before: int
    ) -> None:
        """Set the next token: its id and position [1, 1], its mask of padding.

        Without `positions` the position is `before`, the number of tokens before this one.
        """
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
        is_new = layer not in self._launches
        launches = self._launches_of(layer, make)
        # Torch learns of the stream that writes to pinned memory: an error may free it at once.
        with launches.in_order() if is_new else nullcontext():
            result: Tensor = launches.run(x, index, weights)
        return result

    def _launches_of(self, layer: int, make: MakeLaunches) -> Any:
        """Return the launches of a layer's experts; the first call makes them."""
        if layer not in self._launches:
            first = len(self._launches) * self._top_k
            self._launches[layer] = make(self._reports[first : first + self._top_k])
            self.moe_layers.append(layer)
        return self._launches[layer]

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

    def release(self) -> None:
        """Drop what was captured. The traceback of an error may hold an unused graph for long."""
        self._replay = None

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
        try:  # no context manager: one that an interrupt has met may stay open
            _active.graph = self
            self._hidden.copy_(decode())
        finally:
            _active.graph = None

    def read_reports(self) -> bool:
        """Wait for the reports of the last pass; tell whether all experts were in slots.

        Raises DeviceError if the device has done all work without a report.
        """
        number, engine = self._number, self._engine
        wait_for_report(
            lambda: (self._combined() >> 32 == number) or None,
            lambda: engine.is_idle(engine.current_stream()),
        )
        return bool(self._combined_reports & 1)

    def _combined(self) -> int:
        """Return the bits that all reports have.

        Numbers of look-ups ascend: if one report is of an earlier one, so is the result.
        """
        # A small operation takes NumPy several microseconds, so this is the only one.
        self._combined_reports = int(np.bitwise_and.reduce(self._all_reports))
        return self._combined_reports

    @property
    def chosen(self) -> NDArray[np.int32]:
        """Return the experts of the last pass: [MoE layers, top_k], in the order of launches."""
        return self._choices >> 1
