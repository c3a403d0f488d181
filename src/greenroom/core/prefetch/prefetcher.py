"""The prefetcher: fetches predicted experts into borrowed slots while a link is idle."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from greenroom.core.cache.buffer import BorrowedSlot, BorrowState
from greenroom.core.cache.placement import Placement
from greenroom.core.counts import Counts
from greenroom.core.events import Predicted, Routed
from greenroom.core.pieces import Ints
from greenroom.core.plan import Option, View
from greenroom.core.prefetch.idle import IdlePrefetch
from greenroom.core.prefetch.lookahead import LayerForecast, Lookahead, PrefetchCandidate
from greenroom.core.transfers.queue import Urgency
from greenroom.core.transfers.transfers import Transfers


class Prefetcher:
    """Prefetches predicted experts into borrowed slots, which a layer can reclaim.

    If experts are split, the segments that have no slot are fetched, the top segment first.
    """

    def __init__(
        self, lookahead: Lookahead, placement: Placement, transfers: Transfers, counts: Counts
    ) -> None:
        self.lookahead = lookahead
        self._placement, self._transfers, self._counts = placement, transfers, counts
        self._split = placement.pieces.split is not None
        self.idle = IdlePrefetch(placement, transfers, counts)
        self.drops_unused = True  # prefetches under way that their layer does not use

    # ---- predictions and their outcome

    def predicted(self, event: Predicted) -> None:
        """Replace a layer's prefetch candidates by newly predicted, or already chosen, experts."""
        if event.certain:
            self.lookahead.expect_certain(event.layer, event.experts)
        else:
            self.lookahead.expect(event.layer, event.experts, event.distance)
            if event.priorities is not None:
                self.lookahead.prioritise(event.layer, event.experts, event.priorities)

    def routed(self, event: Routed, now: float) -> None:
        """Compare a layer's prediction with its routing; end prefetches of experts not chosen."""
        placement = self._placement
        if placement.buffer.size:
            expected = self.lookahead.routed(
                event.layer, event.experts, event.prefill, now, placement.cache.state.slot_of
            )
            if expected is not None:
                self._count_fetched(event.layer, expected, event.experts.size)
        used = set(event.experts.tolist())
        for borrowed in placement.buffer.unused_prefetches(event.layer, used):
            if borrowed.state is BorrowState.MOVING:
                if self.drops_unused:
                    self._transfers.drop_prefetch(borrowed.piece)
            else:
                self._counts.wasted += 1
                placement.return_slot(borrowed.piece)
        passed = (
            placement.secondary.end_prefetches(event.layer, used)
            if placement.secondary.capacity
            else ()
        )
        for expert, complete in passed:
            if complete:
                self._counts.wasted += 1
            else:
                self._transfers.drop_prefetch(placement.secondary_of(expert))

    def _count_fetched(self, layer: int, expected: LayerForecast, k: int) -> None:
        """Count a prediction's `k` likeliest experts that were absent, and those prefetched."""
        placement = self._placement
        borrowed, secondary = placement.buffer.borrowed, placement.secondary
        slots = placement.cache.state.slot_of[expected.pieces[:k]].tolist()
        absent = fetched = 0
        for expert, slot in zip(expected.ranked, slots, strict=False):
            resident = complete = slot >= 0
            if not resident and expert in borrowed:
                complete = borrowed[expert].state is BorrowState.COMPLETE
            if self._split and placement.secondary_of(expert) >= 0:  # both segments are needed
                bottom = secondary.is_complete(expert)
                resident = resident and bottom and not secondary.is_prefetched(expert)
                complete = complete and bottom
            if not resident:
                absent += 1
                fetched += complete
        counts = self.lookahead.accuracy.of(layer, expected.distance)
        counts.absent += absent
        counts.fetched += fetched

    def landed(self, piece: int) -> None:
        """Handle the arrival of a prefetched expert that its layer has not requested yet.

        A promoted expert becomes resident; another one waits in its borrowed slot.
        """
        placement = self._placement
        borrowed = placement.buffer.borrowed[piece]
        if borrowed.promotion:
            placement.cache.admit(piece, placement.buffer.release(piece))
            if borrowed.idle:
                self.idle.landed(piece)
            else:
                self._counts.promoted += 1
        else:
            placement.buffer.complete(piece)

    # ---- starting prefetches

    def begin_next(self, excluded: Collection[int]) -> bool:
        """Begin the next prefetch that is worth its transfer; return False if there is none.

        `excluded` experts are not prefetched now.
        """
        placement, queue = self._placement, self._transfers.queue
        if not self.lookahead.candidates:
            return False
        is_open = [queue.open_for(Urgency.PREFETCH, d) for d in range(placement.pieces.devices)]
        if not any(is_open):
            return False
        can_start: Callable[[int], bool] | None = None
        if excluded or not all(is_open):
            device = placement.home_device
            can_start = lambda piece: is_open[device[piece]] and piece not in excluded  # noqa: E731
        if self._split:
            candidate = self.lookahead.nearest(
                None, _Complete(placement), can_start, placement.missing_chunks
            )
        else:
            slots, borrowed = placement.cache.state.slot_of, placement.buffer.borrowed
            candidate = self.lookahead.nearest(slots, borrowed, can_start)
        return candidate is not None and self._begin(candidate)

    def _begin(self, candidate: PrefetchCandidate) -> bool:
        placement, expert = self._placement, candidate.piece
        if not placement.has_slot(expert):
            slot = self._borrow(candidate)
            if slot >= 0 or not placement.buffer.full:  # where all slots are pinned, it is dropped
                self.lookahead.remove(candidate)
            if slot < 0:
                return False
            placement.buffer.begin_prefetch(expert, slot, candidate.layer, candidate.chance)
            self._transfers.prefetch(expert, int(placement.tier_slots[slot]))
        elif placement.secondary.has_room(expert):
            self.lookahead.remove(candidate)
        else:
            return False
        if not placement.has_secondary(expert):
            slot = placement.secondary.begin_prefetch(expert, candidate.layer)
            if slot >= 0:
                place = placement.secondary_tier_slot(slot)
                self._transfers.prefetch(placement.secondary_of(expert), place)
        return True

    def _borrow(self, candidate: PrefetchCandidate) -> int:
        """Borrow a slot for a prefetch; -1 where none is available."""
        placement = self._placement
        if placement.buffer.full:
            displaces = self.lookahead.displaces
            least = placement.buffer.least_likely(candidate.chance) if displaces else None
            if least is None:
                return -1
            self._displace(least)
        slot, evicted = placement.cache.borrow(candidate.piece)
        if evicted >= 0:
            self.lookahead.evicted(evicted)
        return slot

    def promote(self, options: Sequence[Option], view: View) -> bool:
        """Begin to fetch an expert that an option proposes, to become resident on arrival.

        Returns False if no option proposes one, or no slot or link is available.
        """
        placement, queue = self._placement, self._transfers.queue
        devices = placement.pieces.devices
        if placement.buffer.full or (devices == 1 and not queue.open_for(Urgency.PREFETCH, 0)):
            return False
        for option in options:
            for expert, layer in option.candidates(view):
                if not queue.open_for(Urgency.PREFETCH, placement.home_device[expert]):
                    return False
                option.dismiss(expert)
                if placement.has_slot(expert) or expert in self._transfers.entries:
                    continue
                slot, _ = placement.cache.borrow(expert)
                if slot >= 0:
                    placement.buffer.begin_prefetch(expert, slot, layer, 1.0, promotion=True)
                    self._transfers.prefetch(expert, int(placement.tier_slots[slot]))
                return slot >= 0
        return False

    # ---- reclaiming borrowed slots

    def make_room(self, experts: Ints, prefetched: Collection[int]) -> bool:
        """Displace prefetched experts until those of a layer's step fit the cache.

        prefetched: those of the step's experts that have borrowed slots already

        Returns False if they cannot fit.
        """
        if not self._placement.buffer.borrowed:
            return self._placement.cache.fits(experts)
        while (borrowed := self._placement.slot_to_reclaim(experts, prefetched)) is not False:
            if borrowed is None:
                return False
            assert isinstance(borrowed, BorrowedSlot)
            self._displace(borrowed)
        return True

    def yield_slot(self) -> bool:
        """Displace a prefetched expert for a layer's step that cannot continue without a slot.

        If no prefetch is complete, all of them are dropped. False if no slot is free yet.
        """
        buffer = self._placement.buffer
        if (least := buffer.least_likely(2.0)) is not None:
            self._displace(least)
            return True
        before = len(buffer.borrowed)
        for borrowed in list(buffer.borrowed.values()):
            if borrowed.state is BorrowState.MOVING:
                self._transfers.drop_prefetch(borrowed.piece)
        return len(buffer.borrowed) < before

    def abandon(self) -> None:
        """End all prefetches of experts; chunks under way arrive before their slots are free."""
        placement = self._placement
        self.lookahead.clear()
        for borrowed in list(placement.buffer.borrowed.values()):
            if borrowed.state is BorrowState.MOVING:
                self._transfers.drop_prefetch(borrowed.piece)
            else:
                self._displace(borrowed)
        for expert, complete in placement.secondary.end_all_prefetches():
            if complete:
                self._counts.displaced += 1
            else:
                self._transfers.drop_prefetch(placement.secondary_of(expert))

    def retire(self, now: float) -> None:
        """Count the prefetches that end because the cache is emptied; drop all candidates."""
        for borrowed in self._placement.buffer.borrowed.values():
            self._counts.dropped += borrowed.state is BorrowState.MOVING
            self._counts.displaced += borrowed.state is BorrowState.COMPLETE
        self.lookahead.clear()
        self.lookahead.pace.paused()
        self.lookahead.pace.link(now, 0, demanding=False, landed=False)

    def _displace(self, borrowed: BorrowedSlot) -> None:
        self._counts.displaced += 1
        self._placement.return_slot(borrowed.piece)


class _Complete:
    """The experts of which no chunk is missing, as a container."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def __contains__(self, expert: object) -> bool:
        assert isinstance(expert, int)
        return self._placement.missing_chunks(expert) == 0
