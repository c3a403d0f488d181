"""The event machine: every decision of a run, for the runtime and the simulator alike.

`on(event, now) -> actions`. One step is under way at a time. Its requests are accounted one by one
in ascending id, as the cache serves them; what is resident is computed in the first wave, arrivals
in later ones, as many at a time as have landed. A step that needs more slots than there are reuses
them: a piece is loaded only after the one that had its slot earlier in the step is computed.

With slots on loan from the cache, predictions are fetched while a link is free (see `buffer`,
`lookahead`), and the steps of a prompt stream through.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from greenroom.core.buffer import Buffer, Held, Use
from greenroom.core.cache import Cache
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
from greenroom.core.lookahead import Expected, Lookahead, Wish
from greenroom.core.pieces import Ints, Pieces
from greenroom.core.policy import Policy
from greenroom.core.queue import Entry, TransferQueue, Urgency
from greenroom.core.reshape import first_places, reshape
from greenroom.core.scope import Scope
from greenroom.core.step import Counts, Step
from greenroom.core.tiers import HostTier
from greenroom.core.whole import Tables, Whole
from greenroom.errors import UsageError


class Scheduler:
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
    ) -> None:
        """`host` keeps pieces between the two links of a chain."""
        if ahead and pin != "step":
            raise UsageError("prefetching needs the experts of a step to be pinned: pin step")
        self.pieces, self.pin = pieces, pin
        self._capacity, self._ahead = capacity, ahead
        self.cache = Cache(pieces, capacity, policy, scope, seed)
        self.place = first_places(pieces, capacity)  # the tier's slot of each of the cache's
        self.buffer = Buffer(self._loans())
        chain = (lanes,) if isinstance(lanes, int) else lanes
        self.queue = TransferQueue(chain, seats, host, pieces.devices)
        self._home: list[int] = pieces.home.tolist()
        self.lookahead = Lookahead(pieces)
        self.counts = Counts()
        self.step: Step | None = None
        self._now = 0.0
        self._whole: Whole | None = None  # where there is a slot for every piece
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
        """Slots that there are now."""
        return self.cache.capacity

    def on(self, event: Event, now: float = 0.0) -> list[Action]:
        """Take an event that happens `now` (seconds), return what to do now, in this order."""
        actions: list[Action] = []
        self._now = now
        self._handlers[type(event)](event, actions)  # type: ignore[operator]
        return actions

    # ---- a step, from its routing to its end

    def straight(self, pieces: Ints) -> Ints | None:
        """The slots of a step's pieces (ascending), where all of them have one and nothing will be
        evicted: the step is over with this, and its pieces are to be computed. None where it must
        be `Routed`."""
        if self._whole is None or (used := self._whole.use(pieces)) is None:
            return None
        counts = self.counts
        counts.steps += 1
        counts.requests += pieces.size
        counts.hits += pieces.size
        slots: Ints = self.place[used]
        return slots

    def at_once(self, first: int, asked: Ints, find: Callable[[Tables], int]) -> bool:
        """As `straight`, for compiled code: `find(tables)` looks the slots of a step's pieces up,
        notes their use in these tables and in `asked`, and says how many they were; 0 where one
        has no slot. `first` is the layer's first piece."""
        if (whole := self._whole) is None:
            return False
        tables = whole.tables(asked, self.place)
        tables[0] = first
        if not (found := find(tables)):
            return False
        whole.noted()
        counts = self.counts
        counts.steps += 1
        counts.requests += found
        counts.hits += found
        return True

    def _no_longer_whole(self) -> None:
        """The policy hears what it was not told of."""
        if self._whole is not None:
            self._whole.tell()
            self._whole = None

    def _routed(self, event: Routed, actions: list[Action]) -> None:
        if self.step is not None:
            raise RuntimeError("a step is under way")
        self._no_longer_whole()
        if self.queue.host is not None:
            self.queue.host.routed(event)
        size, layer = event.experts.size, event.layer
        ahead = self.buffer.size > 0 or bool(self.buffer.held)
        expected = self._judge(event) if ahead else None
        here = self._here(event.experts) if self.buffer.held else {}
        streamed = ahead and (event.prefill or not self._make_room(event.experts, here))
        if not streamed:
            for piece in here:  # the cache gives them a slot now, and theirs are free
                self._give_back(piece)
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
            if ahead:
                self._fetch(step, absent, here)
            else:
                self._demand(step, absent)
        else:  # nothing to choose: the usual step of a large cache
            step.ready = list(range(size))
        if expected is not None:
            self._note_in_time(step, expected)
        if misses or ahead:
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
        chunks = int(self.pieces.chunks[piece])
        return self.queue.add(piece, slot, chunks, urgency, self._home[piece])

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
        """A wave for every device that computes none now, of what is ready there."""
        ready, step.ready = step.ready, []
        waves: dict[int, list[int]] = {}
        for request in ready:
            device = self._home[int(step.experts[request])]
            (step.ready if device in step.waves else waves.setdefault(device, [])).append(request)
        for device, wave in sorted(waves.items()):
            chosen = np.array(wave, np.int64)
            actions.append(Compute(step.experts[chosen], step.slots[chosen], device))
        step.waves |= waves

    def _landed(self, event: Landed | Failed, actions: list[Action]) -> None:
        entry = self.queue.land(event.link, event.lane, ok=isinstance(event, Landed))
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
            if step is not None and asked:
                step.ready.append(step.missing.pop(piece))
            elif entry.dropped:
                self._give_back(piece)
            else:
                self.buffer.landed(piece)
        elif step is not None and asked:
            if entry.upgraded and not step.ending:  # a failed prefetch: the demand tries itself
                self._add(piece, entry.slot)
            else:
                self._give_up(entry)
        elif piece in self.buffer.held:
            self._give_back(piece)

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
        step.uncomputed -= len(wave)
        for request in wave:
            piece = int(step.experts[request])
            if piece in step.passing:
                step.passing.remove(piece)
                self._give_back(piece)
            elif step.waiting and step.served.pinned:  # its slot is of use to the others
                step.freed.add(piece)
                self.cache.release(step.experts[request : request + 1])
            successor = step.blocked.pop(request, None)
            if successor is not None and not step.ending:
                self._add(int(step.experts[successor]), int(step.slots[successor]))
        self._pump(actions)
        self._advance(actions)

    def _cancelled(self, event: Cancelled, actions: list[Action]) -> None:
        if self.step is not None:
            self.step.waves.clear()
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
            freed = step.freed
            pinned = [e for e in step.experts.tolist() if e not in freed] if freed else step.experts
            self.cache.release(np.asarray(pinned, np.int64))
        for piece in step.passing:  # of a step that was given up
            self._give_back(piece)
        for piece in step.missing:
            if self.cache.state.slot_of[piece] >= 0:
                self.cache.remove(piece, step.now)
        self.step = None
        self._settle(actions)
        self._pump(actions)
        actions.append(Finish(step.failed))
        if self.cache.capacity >= len(self.pieces):
            self._whole = Whole.of(self.cache)

    # ---- what is fetched before it is asked for

    def _predicted(self, event: Predicted, actions: list[Action]) -> None:
        if self.buffer.size:
            if event.certain:
                self.lookahead.decided(event.layer, event.experts)
            else:
                self.lookahead.expect(event.layer, event.experts)
            self._pump(actions)

    def _judge(self, event: Routed) -> Expected | None:
        """A layer's routing is known: its wrong prefetches are dropped, those under way at once."""
        resident = self.cache.state.slot_of
        expected = self.lookahead.routed(
            event.layer, event.experts, event.prefill, self._now, resident
        )
        for held in self.buffer.passed(event.layer, set(event.experts.tolist())):
            if held.use is Use.MOVING:
                self._drop(held.piece)
            else:
                self.counts.wasted += 1
                self._give_back(held.piece)
        return expected

    def _drop(self, piece: int) -> None:
        """Give up a prefetch that is under way; a chunk on a lane lands first."""
        if not self.queue.entries[piece].dropped:
            self.counts.dropped += 1
            if self.queue.drop(piece):
                self._give_back(piece)

    def _give_back(self, piece: int) -> None:
        """The piece is not needed: its slot is the cache's again."""
        self.cache.give_back(self.buffer.release(piece))

    def _here(self, experts: Ints) -> dict[int, Held]:
        """The step's pieces that are in the buffer."""
        held = self.buffer.held
        return {piece: held[piece] for piece in experts.tolist() if piece in held}

    def _make_room(self, experts: Ints, here: Collection[int]) -> bool:
        """Whether a step fits beside what is on loan; prefetches for later layers yield to it."""
        held, group_of = self.buffer.held, self.cache.state.group_of
        alone = self.cache.state.first.size == 2  # one group for all
        for group, asked in self.cache.asked(experts).items():
            others = set() if alone else {piece for piece in held if group_of[piece] != group}
            size = asked - len({*here} - others)  # those here have theirs
            while size + len(held) - len(others) > self.cache.size(group):
                if (least := self.buffer.least(2.0, but=others.union(here))) is None:
                    return False
                self.counts.displaced += 1
                self._give_back(least.piece)
        return True

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
                step.missing[piece] = request
                self._add(piece, int(self.place[slot]))
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

    def _keep_in_place(self, step: Step, misses: list[int], here: dict[int, Held]) -> None:
        """The cache gave a slot to each piece that had been prefetched: let it be the tier's slot
        where its bytes are. What that slot stood for is free, or a miss that has not begun."""
        where = {piece: int(self.place[held.slot]) for piece, held in here.items()}
        for request in misses:
            piece, given = int(step.experts[request]), int(step.served.slots[request])
            if piece in where and given >= 0:
                other = self.place.tolist().index(where[piece])
                self.place[[given, other]] = self.place[[other, given]]

    def _share(self, layer: int) -> int:
        """Misses of a prompt's step that are taken in: to an even share of the cache a layer."""
        state, pieces = self.cache.state, slice(*self.pieces.offsets[layer : layer + 2])
        room = self.cache.room(layer)
        if self.cache.scope == "shared":
            room = -(-room // self.pieces.layers)
        return max(0, room - int((state.slot_of[pieces] >= 0).sum()))

    def _seat(self, step: Step) -> None:
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

    def _passage(self, step: Step, piece: int) -> int:
        """A slot that a piece can stream through; -1 where it must wait for one."""
        while True:
            crowded = self.buffer.full and step.passing  # one slot it may have in any case
            slot = -1 if crowded else self.cache.borrow(piece)[0]
            if slot >= 0 or step.missing or step.waves or step.ready or not self._reclaim():
                return slot

    def _reclaim(self) -> bool:
        """A step could not go on: prefetches for later layers yield. True where a slot is free."""
        if (least := self.buffer.least(2.0)) is not None:
            self.counts.displaced += 1
            self._give_back(least.piece)
            return True
        before = len(self.buffer.held)
        for held in list(self.buffer.held.values()):
            if held.use is Use.MOVING:
                self._drop(held.piece)
        return len(self.buffer.held) < before

    def _pump(self, actions: list[Action]) -> None:
        """Give every idle lane a chunk: of demands, of prefetches under way, of new ones."""
        step = self.step
        if step is not None and step.waiting:
            self._seat(step)
        self._start(actions)
        if self.buffer.size and not (step is not None and step.waiting) and not self._resizing:
            while self._prefetch():
                self._start(actions)

    def _start(self, actions: list[Action]) -> None:
        for transfer in self.queue.start():
            entry, chunk, link, lane, seat = transfer
            actions.append(
                StartChunk(
                    lane, entry.piece, entry.slot, chunk, link, seat,
                    entry.urgency is Urgency.DEMAND, entry.host, transfer.begins,
                )
            )  # fmt: skip
        self._note_link()

    def _prefetch(self) -> bool:
        """Begin the next prefetch that is worth it; False where there is none, or no way open."""
        ways = [self.queue.open_for(Urgency.PREFETCH, d) for d in range(self.pieces.devices)]
        if not any(ways):
            return False
        may = None if all(ways) else lambda piece: ways[self._home[piece]]
        wish = self.lookahead.nearest(self.cache.state.slot_of, self.buffer.held, may)
        if wish is None:
            return False
        slot = self._loan(wish)
        if slot >= 0 or not self.buffer.full:  # where all is pinned, it is given up
            self.lookahead.fulfil(wish)
        if slot < 0:
            return False
        self.buffer.bring(wish.piece, slot, wish.layer, wish.chance)
        self._add(wish.piece, int(self.place[slot]), Urgency.PREFETCH)
        self.counts.prefetches += 1
        return True

    def _loan(self, wish: Wish) -> int:
        """A slot for a prefetch, -1 where none can be had."""
        if self.buffer.full:
            least = self.buffer.least(wish.chance)
            if least is None:
                return -1
            self.counts.displaced += 1
            self._give_back(least.piece)
        slot, evicted = self.cache.borrow(wish.piece)
        if evicted >= 0:
            self.lookahead.evicted(evicted)
        return slot

    def _note_link(self, landed: bool = False) -> None:
        if self.buffer.size:
            queue = self.queue
            self.lookahead.pace.link(self._now, queue.moving, queue.demands > 0, landed)

    def _note_in_time(self, step: Step, expected: Expected) -> None:
        """Of the right predictions, those that were there when they were asked for."""
        experts = step.experts.tolist()
        here = {*experts} - step.missing.keys() - {experts[request] for request in step.waiting}
        likely = expected.ranked[: len(experts)]
        self.lookahead.accuracy.in_time[step.layer] += len(here.intersection(likely))

    # ---- other sizes

    def _loans(self) -> int:
        """Slots that may be on loan: as asked, but no more than a quarter."""
        return max(0, min(self._ahead, self._capacity // 4))

    @property
    def _resizing(self) -> bool:
        return self._capacity != self.cache.capacity

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
        if not len(self.queue):
            self.place, moves = reshape(self.cache, self.place, self._capacity)
            actions += [*moves, Trim(self._capacity)]
