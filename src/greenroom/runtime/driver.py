"""The driver: turns the scheduler's actions into reads and computation, under one lock."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from greenroom.core.events import (
    Cancelled,
    Compute,
    Computed,
    Event,
    Failed,
    Finish,
    Landed,
    Move,
    Resized,
    Routed,
    StartChunk,
    Trim,
)
from greenroom.core.scheduler import Scheduler
from greenroom.errors import ClosedError, StoreError
from greenroom.runtime.copier import Copier, Store
from greenroom.runtime.slots import HostSlots
from greenroom.runtime.turns import Turns

ComputeWave = Callable[[np.ndarray, np.ndarray], None]


@dataclass(slots=True)
class Meter:
    """What transfers cost since the last reset. Bytes are those that the experts have on disk."""

    bytes_read: int = 0
    stall_s: float = 0.0
    passes: int = 0


class Driver:
    """One model's experts at run time. Steps are served one after another."""

    def __init__(self, scheduler: Scheduler, store: Store, slots: HostSlots, lanes: int) -> None:
        self.scheduler, self.slots, self.meter = scheduler, slots, Meter()
        self._store = store
        self._changed = threading.Condition()
        self._one_step = Turns()
        self._orders: deque[Compute | Finish] = deque()
        self._error: StoreError | None = None
        self._pass, self._layer = -1, scheduler.pieces.layers
        self._request = 0
        self._closed = False
        self._copier = Copier(store, slots, lanes, self._delivered)

    def begin_request(self) -> None:
        """The next step belongs to a new prompt."""
        self._request += 1

    def step(
        self,
        layer: int,
        experts: np.ndarray,
        compute: ComputeWave,
        rows: np.ndarray | None = None,
        weights: np.ndarray | None = None,
    ) -> None:
        """Have `compute(experts, slots)` called on every expert of a step once, in waves.

        `experts` are ids within the layer, ascending, int64; `rows` and `weights` the tokens that
        chose each and the sums of their gate weights, for policies that look at them. StoreError
        where one cannot be read; the cache stays usable, and so it does after an exception in
        `compute`.
        """
        if experts.size == 0:
            return
        first = self.scheduler.pieces.offsets[layer]
        with self._one_step:
            if self._closed:
                raise ClosedError("the model was detached: load it again")
            self._pass += layer <= self._layer
            self._layer = layer
            self.meter.passes = self._pass + 1
            try:
                self._tell(Routed(self._pass, layer, experts + first, self._request, rows, weights))
                while isinstance(order := self._next_order(), Compute):
                    compute(order.experts - first, order.slots)
                    self._tell(Computed())
            except BaseException:
                self._abandon()
                raise
            if order.failed >= 0:
                error, self._error = self._error, None
                raise error or StoreError(f"expert {order.failed} could not be read")

    def resize(self, capacity: int) -> None:
        """Change the number of slots between steps."""
        with self._one_step:
            if capacity > self.slots.capacity:
                self.slots.trim(capacity)
            self._tell(Resized(capacity))

    def _tell(self, event: Event) -> None:
        with self._changed:
            self._carry_out(event)

    def _carry_out(self, event: Event) -> None:
        for action in self.scheduler.on(event):
            match action:
                case StartChunk():
                    if action.chunk == 0:
                        self.slots.clear(action.slot)
                    self._copier.start(action)
                case Compute() | Finish():
                    self._orders.append(action)
                    self._changed.notify()
                case Move():
                    self.slots.move(action.source, action.target)
                case Trim():
                    self.slots.trim(action.capacity)

    def _next_order(self) -> Compute | Finish:
        with self._changed:
            if not self._orders:
                begin = time.perf_counter()
                while not self._orders:
                    self._changed.wait()
                self.meter.stall_s += time.perf_counter() - begin
            return self._orders.popleft()

    def _delivered(self, action: StartChunk, nbytes: int, error: StoreError | None) -> None:
        with self._changed:
            self.meter.bytes_read += nbytes
            if error is None:
                self._carry_out(Landed(action.lane, action.piece))
            else:
                self._error = self._error or error
                self._carry_out(Failed(action.lane, action.piece))

    def _abandon(self) -> None:
        """Leave the step; what is moving lands first, since a read cannot be recalled."""
        with self._changed:
            self._orders.clear()
            if self.scheduler.step is not None:
                self._carry_out(Cancelled())
                while not (self._orders and isinstance(self._orders[-1], Finish)):
                    self._changed.wait()
            self._orders.clear()
            self._error = None

    def close(self) -> None:
        """End the threads and free the slots; a step under way ends first."""
        with self._one_step:
            if not self._closed:
                self._closed = True
                self._copier.close()
                self._store.close()
                self.slots.close()
