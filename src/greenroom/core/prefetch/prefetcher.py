"""The prefetcher: fetches predicted experts into borrowed slots while a link is idle."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from greenroom.core.cache.buffer import BorrowedSlot, BorrowState
from greenroom.core.cache.placement import Placement
from greenroom.core.counts import Counts
from greenroom.core.events import Predicted, Routed
from greenroom.core.pieces import Ints
from greenroom.core.plan import Option, View
from greenroom.core.prefetch.lookahead import Expected, Lookahead, PrefetchCandidate
from greenroom.core.transfers.queue import Urgency
from greenroom.core.transfers.transfers import Transfers


class Prefetcher:
    """Predictions, the transfers that they are worth, and the loans that yield to a step.

    Of a split expert the parts that have no slot are fetched, its top segment first.
    """

    def __init__(
        self, lookahead: Lookahead, placement: Placement, transfers: Transfers, counts: Counts
    ) -> None:
        self.lookahead = lookahead
        self._placement, self._transfers, self._counts = placement, transfers, counts
        self._split = placement.pieces.split is not None

    # ---- what is expected, and what became of it

    def predicted(self, event: Predicted) -> None:
        """A layer's experts are expected, or certain."""
        if event.certain:
            self.lookahead.decided(event.layer, event.experts)
        else:
            self.lookahead.expect(event.layer, event.experts)

    def routed(self, event: Routed, now: float) -> Expected | None:
        """A layer's routing is known: its wrong prefetches are dropped, or lose their slots.

        Returns what had been expected of the layer.
        """
        placement = self._placement
        expected = self.lookahead.routed(
            event.layer, event.experts, event.prefill, now, placement.cache.state.slot_of
        )
        used = set(event.experts.tolist())
        for held in placement.buffer.passed(event.layer, used):
            if held.use is BorrowState.MOVING:
                self._transfers.drop_prefetch(held.piece)
            else:
                self._counts.wasted += 1
                placement.return_slot(held.piece)
        passed = (
            placement.secondary.passed(event.layer, used) if placement.secondary.capacity else ()
        )
        for expert, complete in passed:
            if complete:
                self._counts.wasted += 1
            else:
                self._transfers.drop_prefetch(placement.secondary_of(expert))
        return expected

    def landed(self, piece: int) -> None:
        """A piece has come into its borrowed slot before a step asked for it."""
        placement = self._placement
        if placement.buffer.borrowed[piece].stays:
            placement.cache.admit(piece, placement.buffer.release(piece))
            self._counts.adopted += 1
        else:
            placement.buffer.landed(piece)

    def count_in_time(self, layer: int, k: int, present: set[int], expected: Expected) -> None:
        """Count those of the k likeliest experts that were there when a step asked for them."""
        likely = expected.ranked[:k]
        self.lookahead.accuracy.in_time[layer] += len(present.intersection(likely))

    # ---- beginning transfers

    def begin_next(self, but: Collection[int]) -> bool:
        """Begin the next prefetch that is worth its transfer, of none of `but`.

        False where there is none, or no link is idle.
        """
        placement, queue = self._placement, self._transfers.queue
        if not self.lookahead.candidates:
            return False
        ways = [queue.open_for(Urgency.PREFETCH, d) for d in range(placement.pieces.devices)]
        if not any(ways):
            return False
        may: Callable[[int], bool] | None = None
        if but or not all(ways):
            may = lambda piece: ways[placement.home_device[piece]] and piece not in but  # noqa: E731
        if self._split:
            candidate = self.lookahead.nearest(
                None, _Resident(placement), may, placement.missing_chunks
            )
        else:
            slots, held = placement.cache.state.slot_of, placement.buffer.borrowed
            candidate = self.lookahead.nearest(slots, held, may)
        return candidate is not None and self._begin(candidate)

    def _begin(self, candidate: PrefetchCandidate) -> bool:
        placement, expert = self._placement, candidate.piece
        if not placement.resident(expert):
            slot = self._borrow(candidate)
            if slot >= 0 or not placement.buffer.full:  # where all is pinned, it is given up
                self.lookahead.remove(candidate)
            if slot < 0:
                return False
            placement.buffer.bring(expert, slot, candidate.layer, candidate.chance)
            self._transfers.prefetch(expert, int(placement.tier_slots[slot]))
        elif placement.secondary.room:
            self.lookahead.remove(candidate)
        else:
            return False
        if not placement.has_secondary(expert):
            slot = placement.secondary.bring(expert, candidate.layer)
            if slot >= 0:
                place = placement.secondary_tier_slot(slot)
                self._transfers.prefetch(placement.secondary_of(expert), place)
        return True

    def _borrow(self, candidate: PrefetchCandidate) -> int:
        """A slot for a prefetch, -1 where none can be had."""
        placement = self._placement
        if placement.buffer.full:
            least = placement.buffer.least(candidate.chance)
            if least is None:
                return -1
            self._displace(least)
        slot, evicted = placement.cache.borrow(candidate.piece)
        if evicted >= 0:
            self.lookahead.evicted(evicted)
        return slot

    def promote(self, options: Sequence[Option], view: View) -> bool:
        """Begin to fetch what an option wants resident; it is one once it is there.

        False where no option wants anything, or no slot or link can be had for it.
        """
        placement, queue = self._placement, self._transfers.queue
        for option in options:
            for expert, layer in option.candidates(view):
                open_for = queue.open_for(Urgency.PREFETCH, placement.home_device[expert])
                if placement.buffer.full or not open_for:
                    return False
                option.dismiss(expert)
                if placement.resident(expert) or expert in self._transfers.entries:
                    continue
                slot, _ = placement.cache.borrow(expert)
                if slot >= 0:
                    placement.buffer.bring(expert, slot, layer, 1.0, stays=True)
                    self._transfers.prefetch(expert, int(placement.tier_slots[slot]))
                return slot >= 0
        return False

    # ---- yielding slots

    def make_room(self, experts: Ints, here: Collection[int]) -> bool:
        """Whether a step fits beside the borrowed slots; prefetches for later layers yield."""
        if not self._placement.buffer.borrowed:
            return self._placement.cache.fits(experts)
        while (held := self._placement.crowding(experts, here)) is not False:
            if held is None:
                return False
            assert isinstance(held, BorrowedSlot)
            self._displace(held)
        return True

    def yield_slot(self) -> bool:
        """Free a slot for a step that cannot go on; False where no prefetch can yield one yet."""
        buffer = self._placement.buffer
        if (least := buffer.least(2.0)) is not None:
            self._displace(least)
            return True
        before = len(buffer.borrowed)
        for held in list(buffer.borrowed.values()):
            if held.use is BorrowState.MOVING:
                self._transfers.drop_prefetch(held.piece)
        return len(buffer.borrowed) < before

    def abandon(self) -> None:
        """End all loans; transfers under way land first."""
        placement = self._placement
        self.lookahead.clear()
        for held in list(placement.buffer.borrowed.values()):
            if held.use is BorrowState.MOVING:
                self._transfers.drop_prefetch(held.piece)
            else:
                self._displace(held)
        for expert, complete in placement.secondary.waiting():
            if complete:
                self._counts.displaced += 1
            else:
                self._transfers.drop_prefetch(placement.secondary_of(expert))

    def retire(self, now: float) -> None:
        """The cache is emptied: count the loans that end with it, and expect nothing."""
        for held in self._placement.buffer.borrowed.values():
            self._counts.dropped += held.use is BorrowState.MOVING
            self._counts.displaced += held.use is BorrowState.COMPLETE
        self.lookahead.clear()
        self.lookahead.pace.paused()
        self.lookahead.pace.link(now, 0, demanding=False, landed=False)

    def _displace(self, held: BorrowedSlot) -> None:
        self._counts.displaced += 1
        self._placement.return_slot(held.piece)


class _Resident:
    """The experts of which nothing has to be fetched."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def __contains__(self, expert: object) -> bool:
        assert isinstance(expert, int)
        return self._placement.missing_chunks(expert) == 0
