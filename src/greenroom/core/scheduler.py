"""The event machine: every decision of a run, for the runtime and the simulator alike.

`on(event, now) -> actions`. One step is under way at a time. Its requests are accounted one by one
in ascending id, as the cache serves them; what is resident is computed in the first wave, arrivals
in later ones, as many at a time as have landed. A step that needs more slots than there are reuses
them: a piece is loaded only after the one that had its slot earlier in the step is computed.

With slots `ahead` of the cache, predictions are fetched into them while a link is free (see
`buffer`, `lookahead`), and steps of a prompt pass through them (see `streaming`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from greenroom.core.buffer import Buffer, Use
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
    Predicted,
    Resized,
    Routed,
    StartChunk,
    Trim,
)
from greenroom.core.lookahead import Expected, Lookahead
from greenroom.core.pieces import Ints, Pieces
from greenroom.core.policy import Policy
from greenroom.core.queue import Entry, TransferQueue, Urgency
from greenroom.core.reshape import reshape
from greenroom.errors import UsageError


@dataclass(slots=True)
class Counts:
    """What happened since the start.

    Requests are experts of steps; a hit was in its slot when it was asked for. Of those, `useful`
    had been prefetched for that step, and `recalled` were in the buffer for another reason.
    Prefetches that were begun end as useful, `late` (still on its way when asked for: a miss),
    `wasted` (whole, but not asked for by its layer's next step), `dropped` (not whole, and not
    asked for), `displaced` (whole, but the slot was needed sooner) or `failed`; others are under
    way or wait for their layer.
    """

    steps: int = 0
    requests: int = 0
    hits: int = 0
    useful: int = 0
    recalled: int = 0
    prefetches: int = 0
    late: int = 0
    wasted: int = 0
    dropped: int = 0
    displaced: int = 0
    failed: int = 0

    @property
    def misses(self) -> int:
        return self.requests - self.hits


@dataclass(slots=True)
class Step:
    """The step under way. Requests are numbered in its order."""

    now: int
    layer: int
    experts: Ints
    served: Served
    slots: Ints  # of each request: where it is computed, -1 as long as it has no slot
    ready: list[int]  # landed or resident, to be computed
    missing: dict[int, int]  # piece -> request, on its way or to be asked for
    blocked: dict[int, int]  # request -> the later request that takes over its slot
    uncomputed: int
    waiting: list[int] = field(default_factory=list)  # requests without a slot, the next one last
    passing: set[int] = field(default_factory=set)  # pieces computed in the buffer
    wave: list[int] = field(default_factory=list)  # being computed
    late: set[int] = field(default_factory=set)  # pieces that were being prefetched
    failed: int = -1
    ending: bool = False  # cancelled or failed: waits for what is moving, then finishes
    prefill: bool = False


class Scheduler:
    """Decides over one tier of slots, filled over a link, or a chain of them, with so many lanes.

    `ahead` of the `capacity` slots are the prefetch buffer's, no more than half of them; the
    policy's cache has the others.
    """

    def __init__(
        self,
        pieces: Pieces,
        capacity: int,
        policy: Policy,
        *,
        scope: str = "shared",
        pin: str = "step",
        lanes: int | Sequence[int] = 2,
        seats: int | None = None,
        ahead: int = 0,
        seed: int = 0,
    ) -> None:
        if ahead and pin != "step":
            raise UsageError("prefetching needs the experts of a step to be pinned: pin step")
        self.pieces, self.pin = pieces, pin
        self._fewest = pieces.layers if scope == "per-layer" else 1
        self._capacity, self._ahead = capacity, ahead
        buffered = self._buffered()
        self.cache = Cache(pieces, capacity - buffered, policy, scope, seed)
        self.place = np.arange(capacity - buffered, dtype=np.int64)  # of each of the cache's slots
        self.buffer = Buffer(range(capacity - buffered, capacity))
        self.queue = TransferQueue((lanes,) if isinstance(lanes, int) else lanes, seats)
        self.lookahead = Lookahead(pieces)
        self.counts = Counts()
        self.step: Step | None = None
        self._now = 0.0
        self._handlers = {
            Routed: self._routed,
            Predicted: self._predicted,
            Landed: self._landed,
            Failed: self._failed,
            Computed: self._computed,
            Cancelled: self._cancelled,
            Resized: self._resized,
        }

    @property
    def capacity(self) -> int:
        """Slots that there are now, the buffer's among them."""
        return self.cache.capacity + self.buffer.size

    def on(self, event: Event, now: float = 0.0) -> list[Action]:
        """Take an event that happens `now` (seconds), return what to do now, in this order."""
        actions: list[Action] = []
        self._now = now
        self._handlers[type(event)](event, actions)  # type: ignore[operator]
        return actions

    # ---- a step, from its routing to its end

    def _routed(self, event: Routed, actions: list[Action]) -> None:
        if self.step is not None:
            raise RuntimeError("a step is under way")
        size, layer = event.experts.size, event.layer
        expected = self._judge(event) if self.buffer.size else None
        streamed = self.buffer.size > 0 and (event.prefill or size > self.cache.room(layer))
        served = self.cache.serve(
            event.experts,
            event.step * self.pieces.layers + layer,
            self.pin,
            request=event.request,
            rows=event.rows,
            weights=event.weights,
            fill=self._share(layer) if streamed else -1,
        )
        misses = served.misses
        self.counts.steps += 1
        self.counts.requests += size
        self.counts.hits += size - misses
        step = self.step = Step(
            event.step * self.pieces.layers + layer,
            layer,
            event.experts,
            served,
            self.place[served.slots],
            [],
            {},
            {},
            uncomputed=size,
            prefill=event.prefill,
        )
        if misses:
            step.ready = np.flatnonzero(served.hits).tolist()
            absent = np.flatnonzero(served.hits == 0).tolist()
            if self.buffer.size:
                self._fetch(step, absent)
            else:
                self._demand(step, absent)
        else:  # nothing to choose: the usual step of a large cache
            step.wave = list(range(size))
            actions.append(Compute(event.experts, step.slots))
        if expected is not None:
            self._note_in_time(step, expected)
        if misses or self.buffer.size:
            self._pump(actions)
        self._advance(actions)

    def _demand(self, step: Step, misses: list[int]) -> None:
        """Queue the misses, but for those whose slot an earlier request of the step still needs."""
        holder: dict[int, int] = {}
        wanted = set(misses)
        for request, slot in enumerate(step.slots.tolist()):
            if request in wanted:
                piece = int(step.experts[request])
                step.missing[piece] = request
                if slot in holder:
                    step.blocked[holder[slot]] = request
                else:
                    self._add(piece, slot)
            holder[slot] = request

    def _add(self, piece: int, slot: int, urgency: Urgency = Urgency.DEMAND) -> Entry:
        return self.queue.add(piece, slot, int(self.pieces.chunks[piece]), urgency)

    def _advance(self, actions: list[Action]) -> None:
        """Order the next wave, or finish."""
        step = self.step
        if step is None or step.wave:
            return
        if step.ending:
            if not any(piece in self.queue for piece in step.missing):
                self._finish(step, actions)
        elif step.ready:
            step.wave, step.ready = step.ready, []
            chosen = np.array(step.wave, np.int64)
            actions.append(Compute(step.experts[chosen], step.slots[chosen]))
        elif step.uncomputed == 0:
            self._finish(step, actions)

    def _landed(self, event: Landed | Failed, actions: list[Action]) -> None:
        entry = self.queue.land(event.link, event.lane, ok=isinstance(event, Landed))
        if event.link == 0:
            self._note_link(landed=True)
        if entry.gone:
            self._gone(entry)
        elif entry.failed:
            self._give_up(entry)
        self._pump(actions)
        self._advance(actions)
        self._settle(actions)

    def _failed(self, event: Failed, actions: list[Action]) -> None:
        entry = self.queue.entries[event.piece]
        self.counts.failed += entry.urgency is Urgency.PREFETCH and not entry.dropped
        self._landed(event, actions)

    def _gone(self, entry: Entry) -> None:
        """An entry has left the queue: whole, failed, or dropped."""
        piece, step = entry.piece, self.step
        asked = step is not None and piece in step.missing
        if entry.arrived:
            if step is not None and asked:
                step.ready.append(step.missing.pop(piece))
            elif piece in self.buffer.held:
                self.buffer.landed(piece, wanted=not entry.dropped)
        elif step is not None and asked:
            if entry.upgraded and not step.ending:  # a failed prefetch: the demand tries itself
                self._add(piece, entry.slot)
            else:
                self._give_up(entry)
        elif piece in self.buffer.held:
            self.buffer.give_up(piece)

    def _give_up(self, entry: Entry) -> None:
        """A demand has failed, and so has its step."""
        step = self.step
        if step is not None and entry.piece in step.missing and not entry.upgraded:
            if step.failed < 0:
                step.failed = entry.piece
            self._end(step)

    def _computed(self, event: Computed, actions: list[Action]) -> None:
        step = self.step
        if step is None or not step.wave:
            raise RuntimeError("no wave was ordered")
        step.uncomputed -= len(step.wave)
        for request in step.wave:
            piece = int(step.experts[request])
            if piece in step.passing:
                step.passing.remove(piece)
                self.buffer.rest(piece)
            successor = step.blocked.pop(request, None)
            if successor is not None and not step.ending:
                self._add(int(step.experts[successor]), int(step.slots[successor]))
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
        step.waiting.clear()
        for piece in step.missing:
            if piece in self.queue:
                self.queue.drop(piece)

    def _finish(self, step: Step, actions: list[Action]) -> None:
        if step.served.pinned:
            self.cache.release(step.experts)
        for piece in step.passing:  # of a step that was given up
            if piece in step.missing:
                self.buffer.give_up(piece)
            else:
                self.buffer.rest(piece)
        for piece in step.missing:
            if self.cache.state.slot_of[piece] >= 0:
                self.cache.remove(piece, step.now)
        self.step = None
        self._settle(actions)
        self._pump(actions)
        actions.append(Finish(step.failed))

    # ---- what is fetched before it is asked for

    def _predicted(self, event: Predicted, actions: list[Action]) -> None:
        if self.buffer.size:
            self.lookahead.expect(event.layer, event.experts)
            self._pump(actions)

    def _judge(self, event: Routed) -> Expected | None:
        """A layer's routing is known: its wrong prefetches are dropped, those under way at once."""
        expected = self.lookahead.routed(event.layer, event.experts, event.prefill, self._now)
        for held in self.buffer.passed(event.layer, set(event.experts.tolist())):
            self._drop(held.piece)
        self.counts.wasted += self.buffer.wasted
        self.buffer.wasted = 0
        return expected

    def _drop(self, piece: int) -> None:
        """Give up a prefetch that is under way; a chunk on a lane lands first."""
        if not self.queue.entries[piece].dropped:
            self.counts.dropped += 1
            if self.queue.drop(piece):
                self.buffer.give_up(piece)

    def _fetch(self, step: Step, misses: list[int]) -> None:
        """Find the misses in the buffer, where they may be or be coming; demand the others."""
        for request in misses:
            piece, inner = int(step.experts[request]), int(step.served.slots[request])
            held = self.buffer.held.get(piece)
            if held is None:
                if inner < 0:
                    step.waiting.append(request)
                    continue
                slot = self._displace(inner, int(step.served.evicted[request]))
                step.missing[piece] = request
                self._add(piece, slot)
            else:
                here = held.use is not Use.MOVING
                if here:
                    self.counts.hits += 1
                    self.counts.useful += held.fetched
                    self.counts.recalled += not held.fetched
                    step.ready.append(request)
                else:
                    self.counts.late += not self.queue.entries[piece].dropped
                    step.late.add(piece)
                    step.missing[piece] = request
                    self._add(piece, held.slot)
                if inner < 0:
                    slot = self.buffer.occupy(piece)
                    step.passing.add(piece)
                else:
                    evicted = int(step.served.evicted[request])
                    slot = self.buffer.exchange(piece, int(self.place[inner]), evicted)
                    self.place[inner] = slot
            step.slots[request] = slot
        step.ready.sort()
        step.waiting.reverse()

    def _displace(self, inner: int, evicted: int) -> int:
        """Where a miss comes: not over what it evicts, if the buffer has a slot to spare."""
        slot = int(self.place[inner])
        if evicted >= 0 and (spare := self.buffer.spare()) is not None:
            self.buffer.leave(slot, evicted)
            self.place[inner] = slot = spare
        return slot

    def _share(self, layer: int) -> int:
        """Misses of a prompt's step that are taken in: to an even share of the cache a layer."""
        state, pieces = self.cache.state, slice(*self.pieces.offsets[layer : layer + 2])
        room = self.cache.room(layer)
        if self._fewest == 1:
            room = -(-room // self.pieces.layers)
        return max(0, room - int((state.slot_of[pieces] >= 0).sum()))

    def _seat(self, step: Step) -> None:
        """Give slots of the buffer to requests that pass through it."""
        while step.waiting:
            slot = self.buffer.spare()
            if slot is None and not (step.missing or step.wave or step.ready):
                slot = self._reclaim()
            if slot is None:
                return
            request = step.waiting.pop()
            piece = int(step.experts[request])
            self.buffer.occupy(piece, slot)
            step.passing.add(piece)
            step.missing[piece] = request
            step.slots[request] = slot
            self._add(piece, slot)

    def _reclaim(self) -> int | None:
        """A slot for a step that could not go on without: prefetches for later layers yield."""
        slot = self._spare_above(2.0)
        if slot is None:
            for held in list(self.buffer.held.values()):
                if held.use is Use.MOVING:
                    self._drop(held.piece)
            slot = self.buffer.spare()
        return slot

    def _spare_above(self, chance: float) -> int | None:
        """A spare slot of the buffer, or one kept for what is less likely to be used than this."""
        slot = self.buffer.spare()
        if slot is None and (least := self.buffer.least(chance)) is not None:
            self.counts.displaced += least.fetched
            self.buffer.give_up(least.piece)
            slot = self.buffer.spare()
        return slot

    def _pump(self, actions: list[Action]) -> None:
        """Give every idle lane a chunk: of demands, of prefetches under way, of new ones."""
        step = self.step
        if step is not None and step.waiting:
            self._seat(step)
        self._start(actions)
        if self.buffer.size and not (step is not None and step.waiting) and not self._resizing:
            while self.queue.open_for(Urgency.PREFETCH) and self._prefetch():
                self._start(actions)

    def _start(self, actions: list[Action]) -> None:
        for entry, chunk, link, lane, seat in self.queue.start():
            demand = entry.urgency is Urgency.DEMAND
            actions.append(StartChunk(lane, entry.piece, entry.slot, chunk, link, seat, demand))
        self._note_link()

    def _prefetch(self) -> bool:
        """Begin the next prefetch that is worth it; False where there is none."""
        while (wish := self.lookahead.nearest()) is not None:
            held = self.buffer.held.get(wish.piece)
            if held is None and self.cache.state.slot_of[wish.piece] < 0:
                slot = self._spare_above(wish.chance)
                if slot is None:
                    return False
                self.lookahead.fulfil(wish)
                self.buffer.bring(wish.piece, slot, wish.layer, wish.chance)
                self._add(wish.piece, slot, Urgency.PREFETCH)
                self.counts.prefetches += 1
                return True
            if held is not None:
                self.buffer.expect(wish.piece, wish.layer, wish.chance)
            self.lookahead.fulfil(wish)
        return False

    def _note_link(self, landed: bool = False) -> None:
        if self.buffer.size:
            queue = self.queue
            self.lookahead.pace.link(self._now, queue.moving, queue.demanding, landed)

    def _note_in_time(self, step: Step, expected: Expected) -> None:
        """Of the right predictions, those that were there when they were asked for."""
        here = step.experts[[i for i in range(step.experts.size) if i not in self._absent(step)]]
        likely = expected.pieces[: step.experts.size]
        self.lookahead.accuracy.in_time[step.layer] += int(np.isin(likely, here).sum())

    @staticmethod
    def _absent(step: Step) -> set[int]:
        return {*step.missing.values(), *step.waiting}

    # ---- other sizes

    def _buffered(self) -> int:
        """Slots of the buffer: as asked, but no more than half, and the cache keeps its fewest."""
        return max(0, min(self._ahead, self._capacity // 2, self._capacity - self._fewest))

    @property
    def _resizing(self) -> bool:
        buffered = self._buffered()
        return (self._capacity - buffered, buffered) != (self.cache.capacity, self.buffer.size)

    def _resized(self, event: Resized, actions: list[Action]) -> None:
        """A resize waits for the end of the step under way, and for what is being prefetched."""
        self._capacity = event.capacity
        if event.ahead is not None:
            self._ahead = event.ahead
        self._settle(actions)

    def _settle(self, actions: list[Action]) -> None:
        """Resize, as soon as nothing is in the way."""
        if self.step is not None or not self._resizing:
            return
        self.lookahead.clear()
        for piece in list(self.queue.entries):
            self._drop(piece)
        if not len(self.queue):
            self.counts.displaced += sum(held.fetched for held in self.buffer.held.values())
            buffered = self._buffered()
            self.place, self.buffer, moves = reshape(
                self.cache, self.place, self._capacity - buffered, buffered
            )
            actions += [*moves, Trim(self._capacity)]
