"""The event machine: every decision of a run, for the runtime and the simulator alike.

`on(event, now) -> actions`. One step is under way at a time. Its requests are accounted one by one
in ascending id, as the cache serves them; what is resident is computed in the first wave, arrivals
in later ones, as many at a time as have landed. A step that needs more slots than there are reuses
them: a piece is loaded only after the one that had its slot earlier in the step is computed.

With slots on loan from the cache, predictions are fetched while a link is free (`prefetching`), and
the steps of a prompt stream through. With a processor beside host memory some misses are computed
there (`cocompute`).

Misses may be served with less than the exact expert, where that was asked for (`precision`).

Where experts are split, a request is over when its top and then its bottom are computed: the top of
a hit while its bottom arrives. The policy decides about tops; bottoms have slots of their own
(`extras`), which a request gets when it has one for its top.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from greenroom.core.buddies import Buddies
from greenroom.core.buffer import Held, Use
from greenroom.core.cocompute import CoCompute
from greenroom.core.events import (
    Action,
    Cancelled,
    Compute,
    Computed,
    Event,
    Failed,
    Finish,
    Keep,
    Landed,
    Predicted,
    Resized,
    Routed,
    Trim,
)
from greenroom.core.pieces import Pieces
from greenroom.core.policy import Policy
from greenroom.core.precision import Precision, Thresholds
from greenroom.core.queue import Entry, Urgency
from greenroom.core.rates import Rates
from greenroom.core.reshape import reshape
from greenroom.core.scope import Scope
from greenroom.core.step import Step
from greenroom.core.straight import Straight
from greenroom.core.tiers import HostTier
from greenroom.core.whole import Whole
from greenroom.errors import UsageError


class Scheduler(CoCompute, Precision, Straight):
    """Decides over one tier of slots, filled over a link, or a chain of them, with so many lanes.

    Where `pieces` has several devices, each has slots, a last link and waves of its own.

    Up to `ahead` of the slots, and no more than a quarter, may be on loan to prefetches at a time.
    """

    def __init__(
        self,
        pieces: Pieces,
        capacity: int,
        policy: Policy,
        *,
        scope: Scope = "shared",
        pin: str = "step",
        lanes: int | Sequence[int] = 2,
        seats: int | None = None,
        ahead: int = 0,
        seed: int = 0,
        host: HostTier | None = None,
        thresholds: Thresholds | None = None,
        rates: Rates | None = None,
    ) -> None:
        """`host` keeps pieces between the two links of a chain; with `rates` misses may be computed
        there. `capacity` is in whole experts. `thresholds` let misses of small tails be served with
        less than the exact expert."""
        if ahead and pin != "step":
            raise UsageError("prefetching needs the experts of a step to be pinned: pin step")
        super().__init__(
            pieces, capacity, policy, scope, lanes, seats, ahead, seed, host, rates=rates
        )
        self.pin = pin
        self.thresholds = thresholds or Thresholds()
        self.buddies = Buddies(pieces.offsets) if self.thresholds.substitute else None
        self.joining = {}
        self._handlers = {
            Routed: self._routed,
            Predicted: self._predicted,
            Landed: self._landed,
            Failed: self._failed,
            Computed: self._computed,
            Cancelled: self._cancelled,
            Resized: self._resized,
            Keep: self._keep,
        }

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
        self._no_longer_whole()
        if self.queue.host is not None:
            self.queue.host.routed(event)
        size, layer = event.experts.size, event.layer
        ahead = self.buffer.size > 0 or bool(self.buffer.held)
        expected = self._judge(event) if ahead else None
        event, lesser = self._lessened(event)
        here = self._here(event.experts) if self.buffer.held else {}
        streamed = ahead and (event.prefill or not self._make_room(event.experts, here))
        if not streamed:
            for piece in here:  # the cache gives them a slot now, and theirs are free
                self._give_back(piece)
        on_host = self._share_out(event, here)
        served = self.cache.serve(
            event.experts,
            event.step * self.pieces.layers + layer,
            self.pin,
            request=event.request,
            rows=event.rows,
            weights=event.weights,
            fill=self._share(layer) if streamed else -1,
            aside=self._aside(event.experts.size, on_host),
        )
        misses = served.misses
        self.counts.steps += 1
        self.counts.requests += size
        self.counts.hits += event.experts.size - misses
        step = self.step = Step(
            event.step * self.pieces.layers + layer,
            layer,
            event.experts,
            served,
            self.place[served.slots],
            [],
            {},
            {},
            uncomputed=event.experts.size,
            prefill=event.prefill,
            rows=event.rows,
        )
        if self.pieces.split is not None:
            step.stage = [0] * size
            step.lacking = [r for r in range(size) if self._extra_of(int(step.experts[r])) >= 0]
            self.counts.bottoms += len(step.lacking)
            self.counts.bottom_hits += sum(self.extras.whole(e) for e in step.experts.tolist())
        if misses:
            step.ready = np.flatnonzero(served.hits).tolist()
            absent = [r for r in np.flatnonzero(served.hits == 0).tolist() if r not in on_host]
            self._leave_there(step, on_host)
            if ahead:
                self._fetch(step, absent, here)
            else:
                self._demand(step, absent)
        else:  # nothing to choose: the usual step of a large cache
            step.ready = list(range(event.experts.size))
        if lesser is not None:
            self._serve_lesser(step, lesser)
        elif step.lacking:
            self._claim_extras(step)
        if expected is not None:
            self._note_in_time(step, expected)
        if misses or ahead or self.extras:
            self._pump(actions)
        self._advance(actions)

    def _demand(self, step: Step, misses: list[int]) -> None:
        """Queue the misses, but for those whose slot an earlier request of the step still needs."""
        holder: dict[int, int] = {}
        wanted = set(misses)
        for request, slot in enumerate(step.slots.tolist()):
            if request in step.on_host:
                continue
            if request in wanted:
                piece = int(step.experts[request])
                if slot in holder:
                    step.missing[piece] = request
                    step.blocked[holder[slot]] = request
                else:
                    self._ask(step, request, slot)
            holder[slot] = request

    def _advance(self, actions: list[Action]) -> None:
        """Order the next wave, or finish."""
        step = self.step
        if step is None:
            return
        if step.ending:
            if not step.waves and not any(piece in self.queue for piece in step.missing):
                self._finish(step, actions)
        elif step.ready:
            self._order(step, actions)
        elif step.uncomputed == 0:
            self._finish(step, actions)

    def _order(self, step: Step, actions: list[Action]) -> None:
        """A wave for every device, and the host, that computes none now, of what is ready there: of
        tops, and of bottoms where no top is."""
        ready, step.ready = step.ready, []
        if step.stage and not step.waves:
            step.part = min(step.stage[request] for request in ready)
        waves: dict[int, list[int]] = {}
        for request in ready:
            device = self._place_of(step, request)
            later = device in step.waves or (step.stage and step.stage[request] != step.part)
            (step.ready if later else waves.setdefault(device, [])).append(request)
        for device, wave in sorted(waves.items()):
            chosen = np.array(wave, np.int64)
            slots = step.slots[chosen]
            if step.part:
                seats = [step.seats.get(request) for request in wave]  # none of what is left out
                slots = np.array([-1 if n is None else self._seat(n) for n in seats], np.int64)
            actions.append(Compute(step.experts[chosen], slots, device, step.part))
            step.began[device] = self._now
        step.waves |= waves

    def _landed(self, event: Landed | Failed, actions: list[Action]) -> None:
        entry = self.queue.land(event.link, event.lane, ok=isinstance(event, Landed))
        self._note_landed(event.link, event.lane, entry)
        if event.link in self.queue.paced:
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
            if self._is_extra(piece):
                self.extras.landed(piece - self.pieces.experts)
                if step is not None and asked:
                    self._extra_landed(step, step.missing.pop(piece))
            elif step is not None and asked:
                step.ready.append(step.missing.pop(piece))
                if entry.stays:
                    step.lent.add(piece)
            elif entry.dropped:
                self._give_back(piece)
            else:
                self._ahead_landed(piece)
        elif step is not None and asked:
            if entry.upgraded and not step.ending:  # a failed prefetch: the demand tries itself
                self._add(piece, entry.slot)
            else:
                self._give_up(entry)
        else:
            self._vacate(piece)

    def _give_up(self, entry: Entry) -> None:
        """A demand has failed, and so has its step, unless it was over before."""
        step = self.step
        asked = step is not None and entry.piece in step.missing
        if step is not None and asked and not (entry.upgraded or step.ending):
            step.failed = entry.piece
            self._end(step)

    def _computed(self, event: Computed, actions: list[Action]) -> None:
        step = self.step
        if step is None or event.device not in step.waves:
            raise RuntimeError("no wave was ordered")
        wave = step.waves.pop(event.device)
        self._note_computed(step, event.device, wave)
        for request in wave:
            if not self._goes_on(step, request):
                self._request_over(step, request)
        self._pump(actions)
        self._advance(actions)

    def _request_over(self, step: Step, request: int) -> None:
        """A request is computed: who waits for its slot may have it."""
        step.uncomputed -= 1
        piece = int(step.experts[request])
        if request in step.on_host:
            self._left(step, piece)
        elif piece in step.passing:
            step.passing.remove(piece)
            self._give_back(piece)
        elif step.waiting and step.served.pinned and request < step.asked:
            # Its slot is of use to the others.
            step.freed.add(piece)
            self.cache.release(step.experts[request : request + 1])
        successor = step.blocked.pop(request, None)
        if successor is not None and not step.ending:
            self._ask(step, successor, int(step.slots[successor]))

    def _cancelled(self, event: Cancelled, actions: list[Action]) -> None:
        if self.step is not None:
            self.step.waves.clear()
            self._end(self.step)
            self._advance(actions)

    def _end(self, step: Step) -> None:
        """Let nothing more of the step start."""
        step.ending = True
        step.waiting.clear()
        step.lacking.clear()
        for piece in step.missing:
            if piece in self.queue:
                self.queue.drop(piece)

    def _finish(self, step: Step, actions: list[Action]) -> None:
        if step.served.pinned:
            freed = step.freed
            asked = step.experts[: step.asked]
            pinned = [e for e in asked.tolist() if e not in freed] if freed else asked
            self.cache.release(np.asarray(pinned, np.int64))
        self._return(step)
        for piece in step.passing:  # of a step that was given up
            self._give_back(piece)
        for piece in step.missing:
            expert = piece % self.pieces.experts
            self._forget_join(piece)
            if self._is_extra(piece):
                self.extras.lose(expert)
            elif self.cache.state.slot_of[expert] >= 0:
                self.cache.remove(expert, step.now)
        self._unpin_buddies(step)
        for request in step.seats:  # of a step that was given up
            expert = int(step.experts[request])
            if expert in self.extras.slot_of:
                self.extras.done(expert)
        self.step = None
        self._settle(actions)
        self._pump(actions)
        actions.append(Finish(step.failed))
        if self.cache.capacity >= len(self.pieces) and not self.extras:
            self._whole = Whole.of(self.cache)

    def _fetch(self, step: Step, misses: list[int], here: dict[int, Held]) -> None:
        """Use what was prefetched, in its slot or on its way; demand the others."""
        self._keep_in_place(step, misses, here)
        for request in misses:
            piece, slot = int(step.experts[request]), int(step.served.slots[request])
            held = here.get(piece)
            if held is None:
                if slot < 0:
                    step.waiting.append(request)
                    continue
                self._ask(step, request, int(self.place[slot]))
            else:
                if held.use is Use.AHEAD:
                    self.counts.hits += 1
                    self.counts.useful += 1
                    step.ready.append(request)
                else:
                    self.counts.late += not self.queue.entries[piece].dropped
                    step.late.add(piece)
                    step.missing[piece] = request
                    self._add(piece, -1)  # its entry has the slot
                if slot < 0:
                    slot = self.buffer.occupy(piece)
                    step.passing.add(piece)
                elif piece in self.buffer.held:
                    self._give_back(piece)
            step.slots[request] = self.place[slot]
        step.ready.sort()
        step.waiting.reverse()

    def _stream(self, step: Step) -> None:
        """Give slots to requests that stream through, in their order on each device."""
        behind: set[int] = set()  # devices that have none now
        for request in step.waiting[::-1]:
            piece = int(step.experts[request])
            if self._home[piece] in behind:
                continue
            slot = self._passage(step, piece)
            if slot < 0:
                behind.add(self._home[piece])
                continue
            step.waiting.remove(request)
            self.buffer.occupy(piece, slot)
            step.passing.add(piece)
            step.missing[piece] = request
            step.slots[request] = self.place[slot]
            self._add(piece, int(self.place[slot]))

    def _pump(self, actions: list[Action]) -> None:
        """Give every idle lane a chunk: of demands, of prefetches under way, of new ones."""
        step = self.step
        if step is not None and step.waiting:
            self._stream(step)
        if step is not None and step.lacking:
            self._claim_extras(step)
        self._start(actions)
        waits = step is not None and (step.waiting or step.lacking)
        if self.buffer.size and not waits and not self._resizing:
            while self._prefetch() or self._follow():
                self._start(actions)

    # ---- other sizes, and what stays

    def _keep(self, event: Keep, actions: list[Action]) -> None:
        self.cache.keep(event.pieces)

    def _resized(self, event: Resized, actions: list[Action]) -> None:
        """A resize waits for the end of the step under way, and for what is being prefetched."""
        self._capacity = event.capacity
        if event.ahead is not None:
            self._ahead = event.ahead
        self.buffer.size = self._loans()
        self._settle(actions)

    def _settle(self, actions: list[Action]) -> None:
        """Resize, as soon as nothing is in the way."""
        if self.step is not None or not self._resizing:
            return
        self._no_longer_whole()
        self.lookahead.clear()
        for piece, held in list(self.buffer.held.items()):
            if held.use is Use.MOVING:
                self._drop(piece)
            else:
                self.counts.displaced += 1
                self._give_back(piece)
        for expert, whole in self.extras.waiting():
            if whole:
                self.counts.displaced += 1
            else:
                self._drop(self._extra_of(expert))
        if not len(self.queue):
            self.place, moves = reshape(self.cache, self.place, self._capacity)
            self._sized = self._capacity
            actions += [*moves, Trim(self._capacity)]
