"""Experts of a layer in the order of their ids: ProMoE's ablation (section 7.3).

Greenroom reads all missing experts of a step as soon as the router has chosen (ProMoE's early
preemption, 5.2) and computes resident experts first (reordered inference, 5.3). `InOrder` switches
both off, or the second one alone:
 - Experts are computed by id, on each device its own. A resident expert waits for a missing one
   with a lower id.
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
from itertools import takewhile
from typing import Any

import numpy as np

from greenroom.core.cache.buffer import BorrowState
from greenroom.core.cache.cache import NO_PIECES, ServedStep
from greenroom.core.events import ComputeGroup
from greenroom.core.plan import Option
from greenroom.core.scheduler.step import Step


class InOrderStep(Step):
    """A layer's step that computes its experts in ascending id."""

    __slots__ = ("_protected", "_turns")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.in_order, self.reuses_slots = True, self.prefill
        # Of each device, the requests that are not being computed, nor were, in order.
        self._turns: dict[int, list[int]] = {}
        self._protected = NO_PIECES

    def begin(self, served: ServedStep) -> None:
        """Begin a layer's step with the cache slots of its experts."""
        super().begin(served)
        self._protect()
        home = self._placement.home_device
        for request, expert in enumerate(self.experts):
            self._turns.setdefault(home[expert], []).append(request)

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
        """Start to compute the ready experts that no uncomputed expert of their device precedes."""
        if not self.in_order:
            return super().next_groups(now)
        groups, ready = [], set(self.ready)
        for device, turns in self._turns.items():
            if device in self.expert_groups:
                continue
            requests = sorted(takewhile(ready.__contains__, turns), key=self.experts.__getitem__)
            if requests:
                del turns[: len(requests)]
                ready.difference_update(requests)
                self.expert_groups[device], self.start_times[device] = requests, now
                groups.append(ComputeGroup(self.array[requests], self.slots[requests], device))
        self.ready = sorted(ready)
        return groups


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
        device = self._placement.home_device[self.experts[request]]
        first = self._turns[device][:1] == [request] and device not in self.expert_groups
        if not self.in_order or first:
            super().demand(request, slot)
        else:
            self._later_slots[request] = slot
            self.missing[self.experts[request]] = request

    def computed(self, requests: Any) -> None:
        """End the requests for a computed expert group; request the expert that is next."""
        super().computed(requests)
        for device, turns in self._turns.items():
            idle = device not in self.expert_groups and not self.aborted
            if turns and turns[0] in self._later_slots and idle:
                super().demand(turns[0], self._later_slots.pop(turns[0]))


class InOrder(Option):
    """A scheduler option that computes a layer's experts in ProMoE's order, or by id."""

    def __init__(self, on_access: bool = False, cached: bool = False) -> None:
        by_id = OnAccessStep if on_access else InOrderStep
        self.step_class = CachedFirstStep if cached else by_id
