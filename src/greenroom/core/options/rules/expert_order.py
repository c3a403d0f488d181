"""Experts of a layer in the order of their ids: ProMoE's ablation (section 7.3).

Greenroom reads all missing experts of a step as soon as the router has chosen (ProMoE's early
preemption, 5.2) and computes resident experts first (reordered inference, 5.3). `InOrder` switches
both off, or the second one alone:
 - Experts are computed by id. A resident expert waits for a missing one with a lower id.
 - In a prompt each miss is inserted into the cache and evicts what the policy says, even an expert
   that the same step still needs (the cache thrashing of 5.3). Without the option, prompts stream
   through borrowed slots, and residents stay.
 - With `cached` decoded tokens are computed as without the option. In a prompt, experts in memory
   come first, then those whose prefetch is under way, then the others (5.3); misses are inserted
   as by id, but nothing is evicted before it was computed.
 - With `on_access` a missing expert is requested when the experts before it have been computed, and
   the prefetches of a layer that are under way when it is routed are not dropped.
A prefetch that is under way when its expert is chosen continues as a demand in each case. A step
for which prefetches under way leave no slot is computed as without the option. The order changes
durations and hits, never an answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from greenroom.core.cache.buffer import BorrowState
from greenroom.core.cache.cache import NO_PIECES, ServedStep
from greenroom.core.events import ComputeGroup
from greenroom.core.plan import Option
from greenroom.core.scheduler.step import Step


class InOrderStep(Step):
    """A layer's step that computes its experts in ascending id."""

    __slots__ = ("_next", "_protected")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.in_order, self.reuses_slots = True, self.prefill
        self._next = 0  # the first request that is not being computed, nor was
        self._protected = NO_PIECES

    def begin(self, served: ServedStep) -> None:
        """Begin a layer's step with the cache slots of its experts."""
        super().begin(served)
        self._protect()

    def begin_resident(self, served: ServedStep, now: float) -> ComputeGroup:
        """Begin a layer's step whose experts are all resident; they are one group."""
        self._protect()
        return super().begin_resident(served, now)

    def _protect(self) -> None:
        """Pin the step's residents: a prefetch would evict them, since a prompt pins none."""
        if self.reuses_slots:
            state = self._placement.cache.state
            self._protected = self.array[state.slot_of[self.array] >= 0]
            state.pinned[self._protected] += 1

    def close(self) -> None:
        """Release all that a finished layer's step has reserved."""
        self._placement.cache.state.pinned[self._protected] -= 1
        super().close()

    def next_groups(self, now: float) -> Iterable[ComputeGroup]:
        """Start to compute the ready experts that no uncomputed expert precedes."""
        if not self.in_order:
            return super().next_groups(now)
        end, ready = self._next, set(self.ready)
        while end in ready:
            end += 1
        if self.expert_groups or end == self._next:
            return ()
        requests = sorted(range(self._next, end), key=self.experts.__getitem__)
        self.ready = sorted(ready.difference(requests))
        self.expert_groups[0], self.start_times[0], self._next = requests, now, end
        return (ComputeGroup(self.array[requests], self.slots[requests]),)


class CachedFirstStep(InOrderStep):
    """A layer's step that computes a prompt's experts in memory first, and caches the others."""

    __slots__ = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.in_order = self.prefill
        if self.prefill:
            self._sort()

    def _sort(self) -> None:
        """Sort the requests: in memory, being prefetched, missing; each by id."""
        slot_of, borrowed = self._placement.cache.state.slot_of, self._placement.buffer.borrowed
        ranks = []
        for piece in self.array.tolist():
            prefetch = borrowed.get(piece)
            complete = prefetch is not None and prefetch.state is BorrowState.COMPLETE
            ranks.append(0 if complete or slot_of[piece] >= 0 else 1 if prefetch else 2)
        order = np.argsort(ranks, kind="stable")
        self.array = self.array[order]
        self.tokens = None if self.tokens is None else self.tokens[order]
        self.weights = None if self.weights is None else self.weights[order]


class OnAccessStep(InOrderStep):
    """A layer's step that requests a missing expert only when its turn comes."""

    __slots__ = ("_later_slots",)
    keeps_prefetches = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._later_slots: dict[int, int] = {}  # request -> slot

    def demand(self, request: int, slot: int) -> None:
        """Request a missing expert's transfer to a slot, now or when its turn comes."""
        if not self.in_order or (request == self._next and not self.expert_groups):
            super().demand(request, slot)
        else:
            self._later_slots[request] = slot
            self.missing[self.experts[request]] = request

    def computed(self, requests: Any) -> None:
        """End the requests for a computed expert group; request the expert that is next."""
        super().computed(requests)
        if self._next in self._later_slots and not self.aborted:
            super().demand(self._next, self._later_slots.pop(self._next))


class InOrder(Option):
    """A scheduler option that computes a layer's experts in ProMoE's order, or by id."""

    def __init__(self, on_access: bool = False, cached: bool = False) -> None:
        by_id = OnAccessStep if on_access else InOrderStep
        self.step_class = CachedFirstStep if cached else by_id
