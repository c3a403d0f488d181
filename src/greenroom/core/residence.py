"""What is where: the cache's slots, those on loan, extras, and what is on its way to them.

The part of the event machine that asks nobody why: who needs a piece is decided by the steps
(`scheduler`) and the predictions (`prefetching`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from greenroom.core.buffer import Buffer, Held, Use
from greenroom.core.cache import Cache
from greenroom.core.events import Action, StartChunk
from greenroom.core.extras import Extras
from greenroom.core.lookahead import Lookahead
from greenroom.core.pieces import Ints, Pieces
from greenroom.core.policy import Policy
from greenroom.core.queue import Entry, Transfer, TransferQueue, Urgency
from greenroom.core.reshape import first_places, kinds_of
from greenroom.core.scope import Scope
from greenroom.core.step import Counts, Step
from greenroom.core.tiers import HostTier
from greenroom.errors import UsageError


class Residence(ABC):
    """One tier of slots, filled over a link, or a chain of them, with so many lanes."""

    def __init__(
        self,
        pieces: Pieces,
        capacity: int,
        policy: Policy,
        scope: Scope,
        lanes: int | Sequence[int],
        seats: int | None,
        ahead: int,
        seed: int,
        host: HostTier | None,
    ) -> None:
        if host is not None and pieces.split is not None:
            raise UsageError("split experts have no tier between two links: leave out one of them")
        if host is not None and pieces.copies is not None:
            raise UsageError(
                "low-precision copies have no tier between two links: leave out one of them"
            )
        self.pieces = pieces
        self._capacity, self._ahead = capacity, ahead
        self._sized = capacity  # the capacity that the slots are there for
        self.cache = Cache(pieces.first, capacity, policy, scope, seed)
        self.place = first_places(self.cache)  # the tier's slot of each of the cache's
        self._kinds = kinds_of(self.cache)
        self.buffer = Buffer(self._loans())
        beside = pieces.split or pieces.copies
        self.extras = Extras(beside.seats if beside is not None else 0)
        chain = (lanes,) if isinstance(lanes, int) else lanes
        self.queue = TransferQueue(chain, seats, host, pieces.devices)
        self._home: list[int] = pieces.home.tolist()
        self.lookahead = Lookahead(pieces)
        self.counts = Counts()
        self.step: Step | None = None
        self._now = 0.0

    @property
    def capacity(self) -> int:
        """Slots that there are now, of whole experts."""
        return self._sized

    @property
    def _resizing(self) -> bool:
        return self._capacity != self._sized

    def _loans(self) -> int:
        """Slots that may be on loan: as asked, but no more than a quarter."""
        return max(0, min(self._ahead, self._capacity // 4))

    # ---- pieces on their way

    def _add(self, piece: int, slot: int, urgency: Urgency = Urgency.DEMAND) -> Entry:
        chunks = int(self.pieces.chunks[piece])
        return self.queue.add(piece, slot, chunks, urgency, self._home[piece])

    def _start(self, actions: list[Action]) -> None:
        for transfer in self.queue.start():
            entry, chunk, link, lane, seat = transfer
            actions.append(
                StartChunk(
                    lane, entry.piece, entry.slot, chunk, link, seat,
                    entry.urgency is Urgency.DEMAND, entry.host, transfer.begins,
                    self._joins(transfer),
                )
            )  # fmt: skip
        self._note_link()

    @abstractmethod
    def _joins(self, transfer: Transfer) -> int:
        """The slot of the copy that a piece is joined with as its first chunk starts; else -1."""

    def _note_link(self, landed: bool = False) -> None:
        if self.buffer.size:
            queue = self.queue
            self.lookahead.pace.link(self._now, queue.moving, queue.demands > 0, landed)

    def _drop(self, piece: int) -> None:
        """Give up a prefetch that is under way; a chunk on a lane lands first."""
        if not self.queue.entries[piece].dropped:
            self.counts.dropped += 1
            if self.queue.drop(piece):
                self._vacate(piece)

    def _vacate(self, piece: int) -> None:
        """A piece did not come: its slot is free."""
        if self._is_extra(piece):
            self.extras.lose(piece - self.pieces.experts)
        elif piece in self.buffer.held:
            self._give_back(piece)

    # ---- extras: bottoms of split experts, or low-precision copies

    def _is_extra(self, piece: int) -> bool:
        return self.pieces.experts <= piece < 2 * self.pieces.experts

    def _extra_of(self, expert: int) -> int:
        """The piece that is an expert's bottom, or its copy; -1 where it has none."""
        if self.pieces.copies is not None:
            return self.pieces.experts + expert
        variants = self.pieces.variants[expert][0]
        return variants[1] if len(variants) > 1 else -1

    def _seat(self, slot: int) -> int:
        """The tier's slot of a bottom's: they are its last kind."""
        return slot * self._kinds + self._kinds - 1

    # ---- slots on loan

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
            while size + len(held) - len(others) > self.cache.open(group):
                if (least := self.buffer.least(2.0, but=others.union(here))) is None:
                    return False
                self.counts.displaced += 1
                self._give_back(least.piece)
        return True

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
