"""One token's experts on a GPU, by a router's choice that stays there.

A decode step is one token. The look-up, both products and the sum are launched at once. Products
skip experts that are not in slots. The host then reads which these are, and launches the look-up
and the products again as they arrive.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
from torch import Tensor

from greenroom.errors import DeviceError
from greenroom.runtime.kernels.activation import RAW
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.report import TokenReport, read_token, wait_for_report
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.kernels.triton import look_up
from greenroom.runtime.kernels.triton.copies import ListedCopies
from greenroom.runtime.kernels.triton.kernel import Launch, TritonStep, on_device
from greenroom.runtime.kernels.triton.plan import plan_of

if TYPE_CHECKING:  # it imports the kernels
    from greenroom.runtime.cuda.slot_table import SlotTable

Work = Callable[[], None]


class TokenLaunches:
    """The launches for one token's experts in one MoE layer, of one thread.

    The token chooses `top_k` experts, with gate weights of one data type. Inputs are copied to
    memory of their own, so that a sequence of launches is the same for every token; from the second
    token on it is a graph of the device, one launch. While a sequence is launched, the table does
    not change: no slot is overwritten between a look-up and the products that read the slot.

    changes: of the table, which the next second look-up writes; [2 n] in the host's memory
    """

    def __init__(
        self,
        layer: LayerExperts,
        table: SlotTable,
        first: int,
        top_k: int,
        types: tuple[torch.dtype, torch.dtype],
        report: Tensor | None = None,
    ) -> None:
        """Build the launches.

        first:  the model-wide id of the layer's first expert
        types:  of the router's choice, and of the gate weights
        report: memory of the host for reports; None: of its own
        """
        plan, self._table, self._engine = plan_of(layer), table, table.engine
        self._layer, self._first, self._number = layer, first, 0
        device, self.on_device = plan.device, on_device(plan.device)
        with torch.inference_mode(False):
            self._x = torch.zeros(1, layer.hidden, dtype=layer.dtype, device=device)
            self._index, self._weights = (
                torch.zeros(1, top_k, dtype=each, device=device) for each in types
            )
            routing = Routing.of(np.arange(top_k)[None], top_k)
            step = self._step = TritonStep(layer, plan, self._x, routing, self._weights)
            self._result = torch.zeros_like(self._x)
            self._rows = [step.out[rank] for rank in range(top_k)]
            tiles, computed, self._order, tokens, self._number_there = (
                torch.zeros(n, dtype=torch.int64, device=device)
                for n in (4 * top_k, top_k, 2 * top_k, top_k, 1)
            )
            self._copied = torch.zeros(1, dtype=torch.int64, device=device)
            report = self._engine.host_numbers(top_k) if report is None else report
            size, most = triton.next_power_of_2(top_k), top_k * table.listed_copies
            changes = self._engine.host_numbers(4 * size)
        self.copies = ListedCopies(self._engine, most) if most else None
        self._pinned = [report, changes] + ([self.copies.memory] if self.copies else [])
        changes.fill_(-1)
        self._report, self.changes = report.numpy(), changes.numpy()
        self._stream: Any = None  # of the last token
        self._mid = step.mid if plan.activation.code == RAW else None
        self._up = step.projection(
            *(tiles, plan.up, layer.up_bias, step.act if self._mid is None else self._mid),
            *(layer.hidden, layer.inner, plan.activation, tokens),
        )
        self._down = step.projection(
            tiles, plan.down, layer.down_bias, step.out, layer.inner, layer.hidden
        )
        self._sum = step.summation(self._weights)
        arguments = (
            *(table.offsets, tiles, computed, self._order, report, self._number_there, changes),
            *(first, layer.num_experts, top_k),
        )
        self._look_up, self._look_again = (
            Launch(look_up.look_up, (1, 1), arguments, {"AGAIN": again, "K": size, "num_warps": 1})
            for again in (False, True)
        )
        self._sequences: Sequence[Work] = (self._compute, self._compute_again)
        self._counts_agree = True  # of look-ups here and on the device
        self._in_graphs = False

    def start(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Launch the computation of one token's experts; return the sum of those in slots.

        x [1, H], index and weights [1, top_k]; the result [1, H] is complete if all experts are in
        slots.
        """
        with self._table.lock, self.on_device:  # a context of Python's costs 10 microseconds
            self.follow_stream()
            self._table.write_changes()
            if self._number and not self._in_graphs:
                self._capture()
            self._x.copy_(x)
            self._index.copy_(index)
            self._weights.copy_(weights)
            self._look_up_by(self._sequences[0])
            return self._result.clone()

    def run(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Launch the kernels for one token as a part of a larger graph; return the sum [1, H].

        Nothing else uses these launches. Arguments are those of `start`.
        """
        # Within `in_order` too: torch's contexts cannot be entered twice.
        with self._table.lock, on_device(self._x.device):
            self._x.copy_(x)
            self._index.copy_(index)
            self._weights.copy_(weights)
            self._compute()
        return self._result

    def start_kernels(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Launch the kernels for one token, one by one; `start_again` changes the result [1, H]."""
        with self.in_order():
            self._x.copy_(x)
            self._index.copy_(index)
            self._weights.copy_(weights)
            self._look_up_by(self._compute)
            return self._result

    def start_piece(self, piece: Work) -> Tensor:
        """Launch a graph that has `run` of these launches; `start_again` changes the result."""
        with self._table.lock, self.on_device:  # `in_order` takes as long as the launch
            self.follow_stream()
            self._table.write_changes()
            self._look_up_by(piece)
            return self._result

    def launch_piece(self, piece: Work) -> None:
        """Launch a graph as `start_piece` does, behind other launches that are in order."""
        self._follow_table()
        self._look_up_by(piece)

    def capture_again(self) -> None:
        """Make a graph of the launches of `start_again`, for launches that are in a graph."""
        with self.in_order():
            self._launch_again()
            self._sequences = self._compute, self._engine.capture(self._compute_again)
            if self.copies is not None:
                self.copies.capture()

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Return a context whose launches are in order with changes of slots.

        They are behind all changes before, on the calling thread's stream; no slot changes
        meanwhile.
        """
        with self._table.lock, self.on_device:
            self.follow_stream()
            self._table.write_changes()
            yield

    def follow_stream(self) -> None:
        """Put changes of slots on the calling thread's stream; the table's lock is held."""
        self._table.follow_stream()
        self._follow_table()

    def _follow_table(self) -> None:
        if self._stream != self._table.stream:
            self._stream = self._table.stream
            self._hold_pinned()

    def set_count(self, number: int) -> None:
        """Set the device's count of look-ups."""
        self._number_there.fill_(number)

    def _hold_pinned(self) -> None:
        """Copy from the host's memory on the current stream, which torch then remembers.

        Memory that a thread's end frees is not used again before the stream has passed the last
        look-up, which writes the report there, and reads changes.
        """
        for memory in self._pinned:
            self._copied.copy_(memory[:1], non_blocking=True)

    def _capture(self) -> None:
        """Make a graph of each sequence of launches, after all of its kernels were compiled."""
        self._launch_again()
        graphs = [self._engine.capture(each) for each in self._sequences]
        self._sequences, self._in_graphs = graphs, True
        if self.copies is not None:
            self.copies.capture()

    def _launch_again(self) -> None:
        """Launch `_compute_again` for the previous token, whose result does not change."""
        self._engine.wait(self._engine.mark())  # it may still read the previous token's changes
        self._hand_over_changes()
        self._look_up_by(self._compute_again)

    def _look_up_by(self, launch: Work) -> None:
        """Launch a sequence that begins with a look-up, and count the look-up.

        After an exception here, such as an interrupt, the device's count may differ from this one.
        """
        if not self._counts_agree:
            self.set_count(self._number)
        self._counts_agree, self._number = False, self._number + 1
        launch()
        self._counts_agree = True

    def start_again(self, experts: Sequence[int], slots: Sequence[int] | None = None) -> None:
        """Launch the computation of the experts that have arrived since the last launch.

        `experts` are some of them, in `slots`; None: in any ones. Raises DeviceError if the table
        does not say so.
        """
        with self._table.lock, self.on_device:
            self.follow_stream()
            for number, expert in enumerate(experts):
                slot = self._table.slot_of(self._first + expert)
                if slot < 0 or (slots is not None and slot != slots[number]):
                    raise DeviceError(f"the table of slots has expert {expert} in slot {slot}")
            if slots is not None:  # no report came after the last group's look-up
                self._table.write_changes()
            self.compute_loaded()

    def compute_loaded(self, handed_over: bool = False) -> None:
        """Launch the second look-up, which writes the table's changes, and the products.

        handed_over: the changes are in `changes` already

        The caller holds the table's lock, and launches on the table's stream.
        """
        if not handed_over:
            self._hand_over_changes()
        self._look_up_by(self._sequences[1])
        self._table.entries.changed[0] = 0

    def _hand_over_changes(self) -> None:
        """Let the next look-up write the table's changes.

        The last one that was given any has run: this token's report was read after it.
        """
        if not self._table.hand_over(self.changes):
            self._table.write_changes()
            self._table.hand_over(self.changes)

    @property
    def input(self) -> Tensor:
        """Return a token's hidden state [1, H]."""
        return self._x

    def host_kernel(self, layer: LayerExperts) -> Any:
        """Return a kernel for the host's processor; see `KernelStep.host_kernel`."""
        return self._step.host_kernel(layer)

    def merge_outputs(
        self,
        outputs: Tensor,
        experts: Sequence[int],
        report: TokenReport,
        send: Callable[[Tensor], Tensor],
    ) -> None:
        """Add to a token's sum the outputs of experts that another processor has computed.

        outputs: [n, H], before gate weights and post-expert norm
        experts: [n], none of those that were in slots
        send:    copies a tensor to the device
        """
        number = {expert: n for n, expert in enumerate(experts)}
        of_rank = [number.get(expert, -1) for expert in report.by_rank.tolist()]
        ranks, out = [rank for rank, n in enumerate(of_rank) if n >= 0], self._rows
        with self.in_order():
            rows = send(outputs.to(self._step.out.dtype)).unbind()
            torch._foreach_copy_(
                [out[rank] for rank in ranks], [rows[of_rank[rank]] for rank in ranks],
                non_blocking=True,
            )  # fmt: skip
            self._add_up()

    def result(self) -> Tensor:
        """Return the sum over the experts that were computed, after `start_again`: [1, H]."""
        with self.on_device:
            return self._result.clone()

    def _compute(self) -> None:
        self._look_up.start(self._index)
        self._multiply()
        self._add_up()

    def _compute_again(self) -> None:
        self._look_again.start(self._index)
        self._multiply()
        self._add_up()

    def _multiply(self) -> None:
        self._up.start(self._x)
        if self._mid is not None:
            self._step.act.copy_(self._layer.activate(self._mid))
        self._down.start(self._step.act)

    def _add_up(self) -> None:
        out = self._step.out if self._layer.norm is None else self._layer.norm(self._step.out)
        self._sum.start(out, self._weights, self._order, self._result)

    def read_report(self) -> TokenReport:
        """Wait for the report of the last look-up, and return it.

        Raises DeviceError if the device has done all work without a report.
        """
        arguments = self._report, self._number, self._first, self._layer.num_experts
        if (report := read_token(*arguments)) is not None:
            return report
        engine, stream = self._engine, self._stream
        return wait_for_report(partial(read_token, *arguments), lambda: engine.is_idle(stream))


class ThreadTokenLaunches(threading.local):
    """Each thread's `TokenLaunches` of one MoE layer, by top_k and the router's data types."""

    def __init__(self, layer: LayerExperts, table: SlotTable, first: int) -> None:
        self._layer, self._table, self._first = layer, table, first
        self._by_key: dict[Any, TokenLaunches] = {}

    def of(self, x: Tensor, index: Tensor, weights: Tensor) -> TokenLaunches | None:
        """Return the calling thread's launches for one token; None for inputs of another kind.

        x [1, H], index and weights [1, top_k]
        """
        if x.shape[0] != 1 or x.dtype is not self._layer.dtype:
            return None
        key = index.shape[1], (index.dtype, weights.dtype)
        if key not in self._by_key:
            self._by_key[key] = TokenLaunches(self._layer, self._table, self._first, *key)
        return self._by_key[key]

    def of_graph(self, index: Tensor, weights: Tensor, report: Tensor) -> TokenLaunches:
        """Return new launches for tokens like this one, as a part of a larger graph.

        They report to `report`, [top_k] in the host's memory.
        """
        types = index.dtype, weights.dtype
        top_k = index.shape[1]
        return TokenLaunches(self._layer, self._table, self._first, top_k, types, report)
