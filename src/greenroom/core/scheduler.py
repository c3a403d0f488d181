"""The event machine: every decision of a run, for the runtime and the simulator alike.

`on(event) -> actions`. One step is under way at a time. Its requests are accounted one by one in
ascending id, as the cache serves them; what is resident is computed in the first wave, arrivals in
later ones, as many at a time as have landed. A step that needs more slots than there are reuses
them: a piece is loaded only after the one that had its slot earlier in the step is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from greenroom.core.cache import Cache, Served
from greenroom.core.events import (
    Action,
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
from greenroom.core.pieces import Ints, Pieces
from greenroom.core.policy import Policy
from greenroom.core.queue import TransferQueue


@dataclass(slots=True)
class Counts:
    """What was asked of the cache since the start, in requests (one expert of one step each)."""

    steps: int = 0
    requests: int = 0
    hits: int = 0

    @property
    def misses(self) -> int:
        return self.requests - self.hits


@dataclass(slots=True)
class Step:
    """The step under way. Requests are numbered in its order."""

    now: int
    experts: Ints
    served: Served
    ready: list[int]  # landed or resident, to be computed
    missing: dict[int, int]  # piece -> request, on its way or to be asked for
    blocked: dict[int, int]  # request -> the later request that takes over its slot
    uncomputed: int
    wave: list[int] = field(default_factory=list)  # being computed
    failed: int = -1
    ending: bool = False  # cancelled or failed: waits for what is moving, then finishes


class Scheduler:
    """Decides over one tier of slots, filled over one link of `lanes` transfers at a time."""

    def __init__(
        self,
        pieces: Pieces,
        capacity: int,
        policy: Policy,
        *,
        scope: str = "shared",
        pin: str = "step",
        lanes: int = 2,
        seed: int = 0,
    ) -> None:
        self.pieces, self.pin = pieces, pin
        self.cache = Cache(pieces, capacity, policy, scope, seed)
        self.queue = TransferQueue()
        self.counts = Counts()
        self.step: Step | None = None
        self._idle = list(range(lanes))[::-1]
        self._moving = 0
        self._capacity = capacity
        self._handlers = {
            Routed: self._routed,
            Landed: self._landed,
            Failed: self._failed,
            Computed: self._computed,
            Cancelled: self._cancelled,
            Resized: self._resized,
        }

    def on(self, event: Event) -> list[Action]:
        """Take an event, return what to do now, in this order."""
        actions: list[Action] = []
        self._handlers[type(event)](event, actions)  # type: ignore[operator]
        return actions

    def _routed(self, event: Routed, actions: list[Action]) -> None:
        if self.step is not None:
            raise RuntimeError("a step is under way")
        now = event.step * self.pieces.layers + event.layer
        served = self.cache.serve(
            event.experts,
            now,
            self.pin,
            request=event.request,
            rows=event.rows,
            weights=event.weights,
        )
        size, misses = event.experts.size, served.misses
        self.counts.steps += 1
        self.counts.requests += size
        self.counts.hits += size - misses
        step = self.step = Step(now, event.experts, served, [], {}, {}, uncomputed=size)
        if misses == 0:  # nothing to choose: the usual step of a large cache
            step.wave = list(range(size))
            actions.append(Compute(event.experts, served.slots))
            return
        step.ready = np.flatnonzero(served.hits).tolist()
        self._demand(step, np.flatnonzero(served.hits == 0).tolist())
        self._pump(actions)
        self._advance(actions)

    def _demand(self, step: Step, misses: list[int]) -> None:
        """Queue the misses, but for those whose slot an earlier request of the step still needs."""
        holder: dict[int, int] = {}
        wanted = set(misses)
        for request, slot in enumerate(step.served.slots.tolist()):
            if request in wanted:
                piece = int(step.experts[request])
                step.missing[piece] = request
                if slot in holder:
                    step.blocked[holder[slot]] = request
                else:
                    self.queue.add(piece, slot, int(self.pieces.chunks[piece]))
            holder[slot] = request

    def _pump(self, actions: list[Action]) -> None:
        """Give every idle lane a chunk."""
        while self._idle and (next_chunk := self.queue.start()) is not None:
            entry, chunk = next_chunk
            self._moving += 1
            actions.append(StartChunk(self._idle.pop(), entry.piece, entry.slot, chunk))

    def _advance(self, actions: list[Action]) -> None:
        """Order the next wave, or finish."""
        step = self.step
        if step is None or step.wave:
            return
        if step.ending:
            if self._moving == 0:
                self._finish(step, actions)
        elif step.ready:
            step.wave, step.ready = step.ready, []
            chosen = np.array(step.wave, np.int64)
            actions.append(Compute(step.experts[chosen], step.served.slots[chosen]))
        elif step.uncomputed == 0:
            self._finish(step, actions)

    def _landed(self, event: Landed, actions: list[Action]) -> None:
        self._idle.append(event.lane)
        self._moving -= 1
        entry = self.queue.land(event.piece)
        if entry.arrived and self.step is not None and event.piece in self.step.missing:
            self.step.ready.append(self.step.missing.pop(event.piece))
        self._pump(actions)
        self._advance(actions)

    def _failed(self, event: Failed, actions: list[Action]) -> None:
        self._idle.append(event.lane)
        self._moving -= 1
        self.queue.land(event.piece, ok=False)
        if self.step is not None:
            if self.step.failed < 0:
                self.step.failed = event.piece
            self._end(self.step)
        self._advance(actions)

    def _computed(self, event: Computed, actions: list[Action]) -> None:
        step = self.step
        if step is None or not step.wave:
            raise RuntimeError("no wave was ordered")
        step.uncomputed -= len(step.wave)
        for request in step.wave:
            successor = step.blocked.pop(request, None)
            if successor is not None and not step.ending:
                piece = int(step.experts[successor])
                slot = int(step.served.slots[successor])
                self.queue.add(piece, slot, int(self.pieces.chunks[piece]))
        step.wave = []
        self._pump(actions)
        self._advance(actions)

    def _cancelled(self, event: Cancelled, actions: list[Action]) -> None:
        if self.step is not None:
            self.step.wave = []
            self._end(self.step)
            self._advance(actions)

    def _end(self, step: Step) -> None:
        """Let nothing more of the step start."""
        step.ending = True
        for piece in step.missing:
            if piece in self.queue:
                self.queue.drop(piece)

    def _finish(self, step: Step, actions: list[Action]) -> None:
        if step.served.pinned:
            self.cache.release(step.experts)
        for piece in step.missing:
            self.queue.forget(piece)
            if self.cache.state.slot_of[piece] >= 0:
                self.cache.remove(piece, step.now)
        self.step = None
        self._resize(actions)
        actions.append(Finish(step.failed))

    def _resized(self, event: Resized, actions: list[Action]) -> None:
        """A resize waits for the end of the step under way."""
        self._capacity = event.capacity
        if self.step is None:
            self._resize(actions)

    def _resize(self, actions: list[Action]) -> None:
        if self._capacity != self.cache.capacity:
            moves = self.cache.resize(self._capacity, 0)
            actions.extend(Move(*move) for move in moves)
            actions.append(Trim(self._capacity))
