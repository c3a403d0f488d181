"""The current step of the scheduler (one layer of a pass): its requests for experts, its leases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from greenroom.core.cache.cache import ServedStep
from greenroom.core.cache.placement import Placement
from greenroom.core.counts import Counts
from greenroom.core.events import HOST, ComputeGroup, Routed
from greenroom.core.pieces import Ints
from greenroom.core.plan import EXACT, LOW, SKIP, ComputedGroup, StepPlan
from greenroom.core.transfers.transfers import Transfers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence


class Step:
    """A step: one layer of one forward pass, with a request for each expert.

    Requests are numbered in the order in which they are counted. A request ends when its expert, or
    both segments of a split expert, are computed. A step leases what it needs: pins of residents,
    borrowed slots, secondary slots (of bottom segments and copies) and host slots. The leases end
    with the step.

    keeps_prefetches: the layer's prefetches that are under way are not dropped
    """

    keeps_prefetches = False

    __slots__ = (
        "_counts",
        "_one_place",
        "_placement",
        "_served_pieces",
        "_split",
        "_transfers",
        "aborted",
        "array",
        "awaiting_secondary",
        "blocked",
        "clock",
        "exact",
        "expert_groups",
        "experts",
        "failed",
        "hits",
        "host_leases",
        "in_order",
        "late_pieces",
        "layer",
        "missing",
        "next_part",
        "on_host",
        "part",
        "pinned",
        "prefill",
        "ready",
        "released",
        "reuses_slots",
        "secondary_slots",
        "served",
        "slots",
        "start_times",
        "streamed",
        "substitutes",
        "tokens",
        "uncomputed",
        "waiting",
        "weights",
    )  # fmt: skip

    def __init__(
        self, event: Routed, clock: int, placement: Placement, transfers: Transfers, counts: Counts
    ) -> None:
        self._placement, self._transfers, self._counts = placement, transfers, counts
        self._split = placement.pieces.split is not None
        self._one_place = placement.pieces.devices == 1
        self.clock, self.layer, self.prefill = clock, event.layer, event.prefill
        self.array: Ints = event.experts  # [n]
        self.tokens, self.weights = event.rows, event.weights  # [n] of each expert, or None
        self.exact = self.uncomputed = event.experts.size  # exact requests come first
        self.ready: list[int] = []  # requests that can be computed now
        self.missing: dict[int, int] = {}  # piece -> request: on its way, or to be requested
        self.blocked: dict[int, int] = {}  # request -> the later one that reuses its slot
        self.waiting: list[int] = []  # requests without a slot, the next one last
        self.streamed: set[int] = set()  # experts in borrowed slots
        self.released: set[int] = (
            set()
        )  # computed residents, unpinned for the step's other requests
        self.expert_groups: dict[int, Sequence[int]] = {}  # requests being computed, by device
        self.start_times: dict[int, float] = {}  # when each group was ordered
        self.part = EXACT  # of the current group: a segment, or a form
        self.next_part: list[int] = []  # of each request; empty: experts have one part
        self.secondary_slots: dict[int, int] = {}  # request -> secondary slot
        self.awaiting_secondary: list[int] = []  # requests without a secondary slot yet
        self.substitutes: set[int] = set()  # pinned experts whose weights stand in for others
        self.late_pieces: set[int] = set()  # pieces whose prefetch was not complete
        self.on_host: dict[int, tuple[int, bool]] = {}  # request -> (host slot, is resident)
        self.host_leases: set[int] = set()  # pieces whose host slots the step has leased
        self.failed = -1
        self.in_order = False  # experts are computed by id, residents or not
        self.reuses_slots = False  # a miss may get the slot of an expert computed before it
        self.aborted = False  # cancelled or failed: ends once nothing is moving

    # ---- the start of a step

    def choose(self, event: Routed, requests: Ints) -> None:
        """Restrict a layer's exactly computed experts to a part of those that the router chose.

        `requests` are the indices of the remaining experts.
        """
        if requests.size < event.experts.size:
            self.array = event.experts[requests]
            self.tokens = None if event.rows is None else event.rows[requests]
            self.weights = None if event.weights is None else event.weights[requests]
            self.exact = self.uncomputed = requests.size

    def begin(self, served: ServedStep) -> None:
        """Begin a layer's step with the cache slots of its exactly computed experts."""
        self.served, self.pinned, self._served_pieces = served, served.pinned, self.array
        self.experts: list[int] = self.array.tolist()
        self.slots: Ints = self._placement.tier_slots[served.slots]
        self.hits: list[int] = served.hits.tolist()
        self.ready = [request for request, hit in enumerate(self.hits) if hit]

    def begin_resident(self, served: ServedStep, now: float) -> ComputeGroup:
        """Begin a layer's step whose experts are all resident on one device.

        Returns the action that computes the step's only expert group.
        """
        self.served, self.pinned, self._served_pieces = served, served.pinned, self.array
        self.expert_groups[0], self.start_times[0] = range(self.exact), now
        return ComputeGroup(self.array, self._placement.tier_slots[served.slots])

    def take_computed(self, experts: Collection[int], now: float) -> None:
        """Put ready experts that were computed before the step into a first group."""
        requests = [request for request in self.ready if self.experts[request] in experts]
        if requests:
            self.ready = [request for request in self.ready if self.experts[request] not in experts]
            self.expert_groups[0], self.start_times[0] = requests, now

    def split(self) -> None:
        """Add the bottom segments of split experts to a layer's requests for top segments."""
        secondary, secondary_of = self._placement.secondary, self._placement.secondary_of
        self.next_part = [EXACT] * len(self.experts)
        self.awaiting_secondary = [
            r for r, expert in enumerate(self.experts) if secondary_of(expert) >= 0
        ]
        self._counts.bottoms += len(self.awaiting_secondary)
        self._counts.bottom_hits += sum(map(secondary.is_complete, self.experts))

    def approximate(self, event: Routed, plan: StepPlan) -> None:
        """Add the experts that are computed approximately, or skipped, to a layer's requests.

        `plan` contains only these experts.
        """
        placement, first, forms = self._placement, len(self.experts), plan.form.tolist()
        self.array = np.concatenate([self.array, event.experts[plan.request]])
        self.experts = self.array.tolist()
        if self.tokens is not None and event.rows is not None:
            self.tokens = np.concatenate([self.tokens, event.rows[plan.request]])
        self.next_part = [EXACT] * first + forms
        low = [r for r, form in enumerate(forms, first) if form == LOW]
        skipped = forms.count(SKIP)
        slots = placement.tier_slots[placement.cache.state.slot_of[plan.weights]]
        slots[plan.form != EXACT] = -1
        self.slots = np.concatenate([self.slots, slots])
        self.uncomputed = len(self.experts)
        self.ready += [r for r, form in enumerate(forms, first) if form != LOW]
        self.awaiting_secondary = low
        counts = self._counts
        counts.low += len(low)
        counts.low_hits += sum(placement.secondary.is_complete(self.experts[r]) for r in low)
        counts.skipped += skipped
        counts.substituted += len(forms) - len(low) - skipped

    def compute_on_host(self) -> None:
        """Mark the experts that the host computes as ready, or request their reads from disk."""
        for request, (slot, resident) in self.on_host.items():
            piece = self.experts[request]
            self.slots[request] = slot
            if resident:
                self.host_leases.add(piece)
                self.ready.append(request)
            else:
                self.missing[piece] = request
                self._transfers.bring_to_host(piece, slot)
        self._counts.on_host += len(self.on_host)

    # ---- slots

    def demand(self, request: int, slot: int) -> None:
        """Request the transfer of a layer's missing expert to a memory slot."""
        expert = self.experts[request]
        if expert in self.missing:  # it has waited for its slot
            del self.missing[expert]
        self.missing[self._transfers.demand(expert, slot)] = request

    def claim_secondary(self) -> None:
        """Give slots to bottom segments or low-precision copies that a layer needs, in order.

        An expert waits while an earlier expert of the step uses its slot.
        """
        secondary, counts = self._placement.secondary, self._counts
        later = {*self.waiting, *self.blocked.values()}
        for request in [r for r in self.awaiting_secondary if r not in later]:
            expert = self.experts[request]
            moving, complete = expert in secondary.slot_of, secondary.is_complete(expert)
            ahead = secondary.is_prefetched(expert)
            slot = secondary.claim(expert)
            if slot < 0:
                continue
            self.awaiting_secondary.remove(request)
            self.secondary_slots[request] = slot
            if complete:
                counts.useful += ahead
                self.secondary_landed(request)
                continue
            piece = self._placement.secondary_of(expert)
            if moving:  # a prefetch under way; a dropped one is begun again
                counts.late += not self._transfers.entries[piece].dropped
                self.late_pieces.add(piece)
            self.missing[piece] = request
            self._transfers.add(piece, self._placement.secondary_tier_slot(slot))

    def secondary_landed(self, request: int) -> None:
        """Mark a low-precision copy or bottom segment as arrived for its step.

        A copy can be computed now; a bottom segment waits until its top segment is computed.
        """
        if self.next_part[request] == LOW:
            self.ready.append(request)

    def stream(self, request: int, slot: int) -> None:
        """Fetch one of a layer's experts into a borrowed slot; it does not become resident."""
        piece = self.experts[request]
        self.waiting.remove(request)
        self._placement.buffer.occupy(piece, slot)
        self.streamed.add(piece)
        self.missing[piece] = request
        self.slots[request] = self._placement.tier_slots[slot]
        self._transfers.add(piece, int(self.slots[request]))

    # ---- groups

    def next_groups(self, now: float) -> Iterable[ComputeGroup]:
        """Start the computation of ready experts on each idle device and on the host.

        Each of these processors gets one expert group. Groups that start together compute the same
        part of their experts: bottom segments if no top segment is ready.
        """
        if self._one_place and not (self.next_part or self.on_host):
            if self.expert_groups:
                return ()
            requests, self.ready = self.ready, []
            self.expert_groups[0], self.start_times[0] = requests, now
            return (ComputeGroup(self.array[requests], self.slots[requests]),)
        ready, self.ready = self.ready, []
        groups, orders = self._divide(ready), []
        for device, requests in sorted(groups.items()):
            slots = self.slots[requests]
            if self.part:
                place = self._placement.secondary_tier_slot  # a skipped expert has no slot
                each = [
                    place(self.secondary_slots[r]) if r in self.secondary_slots else -1
                    for r in requests
                ]
                slots = np.array(each, np.int64)
            self.start_times[device] = now
            orders.append(ComputeGroup(self.array[requests], slots, device, self.part))
        self.expert_groups |= groups
        return orders

    def _divide(self, ready: list[int]) -> dict[int, list[int]]:
        """Divide ready requests by device; those on a busy device go back to `ready`."""
        if self.next_part and not self.expert_groups:
            self.part = min(self.next_part[request] for request in ready)
        home, groups = self._placement.home_device, dict[int, list[int]]()
        for request in ready:
            device = HOST if request in self.on_host else home[self.experts[request]]
            later = device in self.expert_groups or (
                self.next_part and self.next_part[request] != self.part
            )
            (self.ready if later else groups.setdefault(device, [])).append(request)
        return groups

    def describe_group(self, device: int, requests: Sequence[int]) -> ComputedGroup:
        """Describe an expert group that is being computed, for scheduler options."""
        form = EXACT if self._split or not self.next_part else self.next_part[requests[0]]
        tokens = [1] * len(requests) if self.tokens is None else self.tokens[requests].tolist()
        experts = self.array[requests].tolist()
        return ComputedGroup(self.layer, self.prefill, device, form, experts, tokens)

    def computed(self, requests: Sequence[int]) -> None:
        """End the requests for a computed expert group, or begin their next segment."""
        if not (self.next_part or self.on_host or self.streamed or self.waiting or self.blocked):
            self.uncomputed -= len(requests)
            return
        for request in requests:
            if not (self.next_part and self.has_next_part(request)):
                self.end_request(request)

    def experts_on_host(self) -> set[int]:
        """Return the experts that the host computes for a layer; they are not prefetched now."""
        return {self.experts[request] for request in self.on_host}

    def has_next_part(self, request: int) -> bool:
        """Record that an expert's segment was computed; tell whether its bottom segment follows."""
        secondary, expert = self._placement.secondary, self.experts[request]
        if self._split:
            self.next_part[request] += 1
            if self.next_part[request] == 1 and self._placement.secondary_of(expert) >= 0:
                if request in self.secondary_slots and secondary.is_complete(expert):
                    self.ready.append(request)
                return True
        if request in self.secondary_slots:
            secondary.release(expert)
            del self.secondary_slots[request]
        return False

    def end_request(self, request: int) -> None:
        """End the request for a computed expert, and release its slot.

        If a later expert of the layer waits for this slot, its transfer is requested now.
        """
        self.uncomputed -= 1
        piece = self.experts[request]
        if request in self.on_host:
            self.host_leases.remove(piece)
            self._release_host_slot(piece)
        elif piece in self.streamed:
            self.streamed.remove(piece)
            self._placement.return_slot(piece)
        elif self.waiting and self.pinned and request < self.exact:
            self.released.add(piece)
            self._placement.cache.release(self.array[request : request + 1])
        if self.blocked:
            successor = self.blocked.pop(request, None)
            if successor is not None and not self.aborted:
                self.demand(successor, int(self.slots[successor]))

    def _release_host_slot(self, piece: int) -> None:
        assert self._transfers.host is not None
        self._transfers.host.release(piece, True)

    # ---- the end

    @property
    def landing(self) -> bool:
        """Tell whether a step's experts are still being computed or transferred."""
        return bool(self.expert_groups) or any(p in self._transfers.entries for p in self.missing)

    def abort(self) -> None:
        """Abort a layer's step: no more of its computations or transfers start."""
        self.aborted = True
        self.waiting.clear()
        self.awaiting_secondary.clear()
        for piece in self.missing:
            if piece in self._transfers.entries:
                self._transfers.queue.drop(piece)

    def close(self) -> None:
        """Release all slots, pins and copies that a finished layer's step has reserved."""
        placement, cache, secondary = (
            self._placement,
            self._placement.cache,
            self._placement.secondary,
        )
        if self.pinned:
            pieces = self._served_pieces
            if self.released:
                pieces = np.array([e for e in pieces.tolist() if e not in self.released], np.int64)
            cache.release(pieces)
        for piece in self.host_leases:
            self._release_host_slot(piece)
        for piece in self.streamed:
            placement.return_slot(piece)
        for piece in self.missing:
            expert = piece % placement.pieces.experts
            self._transfers.release_copy(piece)
            if placement.is_secondary(piece):
                secondary.free(expert)
            elif cache.state.slot_of[expert] >= 0:
                cache.remove(expert, self.clock)
        for expert in self.substitutes:
            cache.state.pinned[expert] -= 1
        for request in self.secondary_slots:
            if self.experts[request] in secondary.slot_of:
                secondary.release(self.experts[request])
