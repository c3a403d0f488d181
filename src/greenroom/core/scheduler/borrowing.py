"""A step and borrowed slots: experts that were prefetched, and experts that stream through."""

from __future__ import annotations

from greenroom.core.cache.buffer import BorrowedSlot, BorrowState
from greenroom.core.cache.placement import Placement
from greenroom.core.counts import Counts
from greenroom.core.events import Routed
from greenroom.core.pieces import Ints
from greenroom.core.prefetch.prefetcher import Prefetcher
from greenroom.core.scheduler.step import Step
from greenroom.core.transfers.transfers import Transfers


class Borrowing:
    """Gives a step the slots that prefetches hold for it, and borrowed ones where it needs more."""

    def __init__(
        self, placement: Placement, transfers: Transfers, prefetcher: Prefetcher, counts: Counts
    ) -> None:
        self._placement, self._transfers = placement, transfers
        self._prefetcher, self._counts = prefetcher, counts

    def begin(self, event: Routed, experts: Ints) -> tuple[dict[int, BorrowedSlot], int]:
        """End the loans that a step takes over, or that are in its way.

        Returns the step's experts that have, or had, borrowed slots; and how many misses the cache
        admits where the others stream through, -1: all of them.
        """
        placement = self._placement
        here = placement.borrowed(experts.tolist())
        if event.prefill or not self._prefetcher.make_room(experts, here):
            return here, placement.prompt_share(event.layer)
        for piece in here:  # the cache gives them a slot now, and theirs are free
            placement.return_slot(piece)
        return here, -1

    def fetch(self, step: Step, misses: list[int], here: dict[int, BorrowedSlot]) -> None:
        """Use what was prefetched, in its slot or on its way; demand the other misses.

        Requests for which the cache has no slot wait for a borrowed one.
        """
        placement, given = self._placement, step.served.slots.tolist()
        where = {piece: int(placement.tier_slots[held.slot]) for piece, held in here.items()}
        for request in misses if here else ():
            piece = step.experts[request]
            if piece in where and given[request] >= 0:
                placement.exchange(piece, given[request], where[piece])
        for request in misses:
            slot, held = given[request], here.get(step.experts[request])
            if held is not None:
                slot = self._take_over(step, request, held, slot)
            elif slot < 0:
                step.waiting.append(request)
                continue
            else:
                step.ask(request, int(placement.tier_slots[slot]))
            step.slots[request] = placement.tier_slots[slot]
        step.ready.sort()
        step.waiting.reverse()

    def _take_over(self, step: Step, request: int, held: BorrowedSlot, slot: int) -> int:
        """A request's expert was prefetched: the cache's slot that it has from now on."""
        piece, buffer, counts = held.piece, self._placement.buffer, self._counts
        if held.use is BorrowState.COMPLETE:
            counts.hits += 1
            counts.useful += 1
            step.ready.append(request)
        else:
            counts.late += not self._transfers.entries[piece].dropped
            step.late.add(piece)
            step.missing[piece] = request
            self._transfers.add(piece, -1)  # its entry has the slot
        if slot < 0:
            slot = buffer.occupy(piece)
            step.passing.add(piece)
        elif piece in buffer.borrowed:
            self._placement.return_slot(piece)
        return slot

    def stream(self, step: Step) -> None:
        """Give borrowed slots to requests that wait for one, in their order on each device."""
        behind: set[int] = set()  # devices that have none now
        for request in step.waiting[::-1]:
            device = self._placement.home_device[step.experts[request]]
            if device in behind:
                continue
            slot = self._passage(step, step.experts[request])
            if slot < 0:
                behind.add(device)
            else:
                step.stream(request, slot)

    def _passage(self, step: Step, piece: int) -> int:
        """A slot that an expert can stream through; -1 where it must wait for one."""
        placement = self._placement
        while True:
            crowded = placement.buffer.full and step.passing  # it may have one in any case
            slot = -1 if crowded else placement.cache.borrow(piece)[0]
            moving = step.missing or step.groups or step.ready
            if slot >= 0 or moving or not self._prefetcher.yield_slot():
                return slot
