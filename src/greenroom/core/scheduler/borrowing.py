"""A step's use of borrowed cache slots: prefetched experts, and experts never cached.

A step is one layer of one forward pass. Experts that the cache does not insert are fetched into
borrowed slots one after another.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from greenroom.core.cache.buffer import BorrowedSlot, BorrowState
from greenroom.core.cache.cache import Flags
from greenroom.core.cache.placement import Placement
from greenroom.core.counts import Counts
from greenroom.core.events import Routed
from greenroom.core.prefetch.prefetcher import Prefetcher
from greenroom.core.scheduler.step import Step
from greenroom.core.transfers.transfers import Transfers


class Borrowing:
    """A layer's use of borrowed cache slots, for prefetched experts and uncached ones."""

    def __init__(
        self, placement: Placement, transfers: Transfers, prefetcher: Prefetcher, counts: Counts
    ) -> None:
        self._placement, self._transfers = placement, transfers
        self._prefetcher, self._counts = prefetcher, counts

    def begin(self, event: Routed, step: Step) -> tuple[dict[int, BorrowedSlot], int]:
        """Reclaim the cache slots, borrowed by prefetches, that a layer's step needs.

        Returns the borrowed slots of the step's own experts, by expert (some may be returned to the
        cache already); and how many misses the cache may insert while the others pass through
        borrowed slots, -1: all.
        """
        placement, experts = self._placement, step.array
        prefetched = placement.borrowed(experts.tolist())
        streams = event.prefill and placement.buffer.size > 0
        if streams or not self._prefetcher.make_room(experts, prefetched):
            step.reuses_slots = step.in_order = step.in_order and placement.leaves_slots(experts)
            if step.reuses_slots:
                return self._admit(prefetched), -1
            return prefetched, placement.prompt_share(event.layer)
        for piece in prefetched:  # the cache gives each a slot instead
            placement.return_slot(piece)
        return prefetched, -1

    def _admit(self, prefetched: dict[int, BorrowedSlot]) -> dict[int, BorrowedSlot]:
        """Make a step's complete prefetches resident; return those that are under way."""
        moving = {}
        for piece, borrowed in prefetched.items():
            if borrowed.state is BorrowState.COMPLETE:
                self._placement.cache.admit(piece, self._placement.buffer.release(piece))
                self._counts.useful += 1
            else:
                moving[piece] = borrowed
        return moving

    def moving(self, step: Step, prefetched: Container[int]) -> Flags:
        """Return a flag for each of a step's experts: its prefetch keeps its borrowed slot."""
        return np.array([piece in prefetched for piece in step.array.tolist()])

    def take_moving(
        self, step: Step, misses: list[int], moving: dict[int, BorrowedSlot]
    ) -> list[int]:
        """Compute prefetches that are under way from their borrowed slots; return other misses."""
        for request in misses:
            if (borrowed := moving.get(step.experts[request])) is not None:
                slot = self._take_over(step, request, borrowed, -1)
                step.slots[request] = self._placement.tier_slots[slot]
        return [request for request in misses if step.experts[request] not in moving]

    def fetch(self, step: Step, misses: list[int], prefetched: dict[int, BorrowedSlot]) -> None:
        """Use the prefetches of a layer's experts, and request its other missing experts.

        misses:     the indices of the missing experts in the step
        prefetched: the borrowed slots of the step's experts, by expert

        Experts whose prefetches have begun are requested first, in the order in which they began,
        before those that are still to be read: this is the order of ProMoE's reordered inference
        (section 5.3). Experts for which the cache has no slot wait for a borrowed one.
        """
        placement, slots = self._placement, step.served.slots.tolist()
        tier_slots = {p: int(placement.tier_slots[b.slot]) for p, b in prefetched.items()}
        for request in misses if prefetched else ():
            piece = step.experts[request]
            if piece in tier_slots and slots[request] >= 0:
                placement.exchange(slots[request], tier_slots[piece])
        for request in self._begun_first(step, misses, prefetched) if prefetched else misses:
            slot, borrowed = slots[request], prefetched.get(step.experts[request])
            if borrowed is not None:
                slot = self._take_over(step, request, borrowed, slot)
            elif slot < 0:
                step.waiting.append(request)
                continue
            else:
                step.demand(request, int(placement.tier_slots[slot]))
            step.slots[request] = placement.tier_slots[slot]
        step.ready.sort()
        step.waiting.reverse()

    def _begun_first(self, step: Step, misses: list[int], prefetched: Container[int]) -> list[int]:
        """Order a step's misses: those whose prefetches have begun come before the others."""
        request_of = {step.experts[request]: request for request in misses}
        begun = [
            request_of[piece]
            for piece in self._transfers.entries
            if piece in prefetched and piece in request_of
        ]
        return [*begun, *(request for request in misses if request not in begun)]

    def _take_over(self, step: Step, request: int, borrowed: BorrowedSlot, slot: int) -> int:
        """Use a prefetched expert for a step; returns its slot from now on."""
        piece, buffer, counts = borrowed.piece, self._placement.buffer, self._counts
        if borrowed.state is BorrowState.COMPLETE:
            counts.hits += 1
            counts.useful += 1
            step.ready.append(request)
        else:
            counts.late += not self._transfers.entries[piece].dropped
            step.late_pieces.add(piece)
            step.missing[piece] = request
            self._transfers.add(piece, -1)  # its entry has the slot
        if slot < 0:
            slot = buffer.occupy(piece)
            step.streamed.add(piece)
        elif piece in buffer.borrowed:
            self._placement.return_slot(piece)
        return slot

    def stream(self, step: Step) -> None:
        """Give borrowed cache slots to experts of a layer that wait for a slot.

        On each device the experts get slots in their order, until no slot is left.
        """
        full: set[int] = set()  # devices without a slot now
        for request in step.waiting[::-1]:
            device = self._placement.home_device[step.experts[request]]
            if device in full:
                continue
            slot = self._slot_to_stream(step, step.experts[request])
            if slot < 0:
                full.add(device)
            else:
                step.stream(request, slot)

    def _slot_to_stream(self, step: Step, piece: int) -> int:
        """Borrow a slot for an expert to pass through; -1 if the expert must wait for one."""
        placement = self._placement
        while True:
            # A step may always borrow one slot.
            at_limit = placement.buffer.full and step.streamed
            slot = -1 if at_limit else placement.cache.borrow(piece)[0]
            moving = step.missing or step.expert_groups or step.ready
            if slot >= 0 or moving or not self._prefetcher.yield_slot():
                return slot
