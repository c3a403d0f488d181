"""The step under way: the state of each of its requests, and the leases that end with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from greenroom.core.cache.cache import Served
from greenroom.core.cache.placement import Placement
from greenroom.core.counts import Counts
from greenroom.core.events import HOST, ComputeGroup, Routed
from greenroom.core.pieces import Ints
from greenroom.core.plan import EXACT, LOW, SKIP, ComputedGroup, Plan
from greenroom.core.transfers.transfers import Transfers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Step:
    """One layer of one pass. Requests are numbered in the order in which they are accounted.

    A request ends when its expert is computed, of a split expert when both segments are. Leases are
    pins of residents, borrowed slots, secondary slots and slots of host memory.
    """

    __slots__ = (
        "_asked", "_counts", "_one_place", "_placement", "_split", "_transfers", "array", "began",
        "blocked", "clock", "ending", "exact", "experts", "failed", "freed", "groups", "hits",
        "lacking", "late", "layer", "lent", "missing", "on_host", "part", "passing", "pinned",
        "prefill", "ready", "secondary_slots", "served", "slots", "stage", "substitutes",
        "tokens", "uncomputed", "waiting", "weights",
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
        self.exact = self.uncomputed = event.experts.size  # requests of the cache come first
        self.ready: list[int] = []  # requests that can be computed now
        self.missing: dict[int, int] = {}  # piece -> request, on its way or to be asked for
        self.blocked: dict[int, int] = {}  # request -> the later one that takes over its slot
        self.waiting: list[int] = []  # requests without a slot, the next one last
        self.passing: set[int] = set()  # experts in borrowed slots
        self.freed: set[int] = set()  # residents whose slots the step may reuse
        self.groups: dict[int, Sequence[int]] = {}  # requests being computed, by device
        self.began: dict[int, float] = {}  # when each group of them was ordered
        self.part = EXACT  # what the group under way computes: a segment, or a form
        self.stage: list[int] = []  # the next part of each request; empty: they have one
        self.secondary_slots: dict[int, int] = {}  # request -> secondary slot
        self.lacking: list[int] = []  # requests whose secondary slot is yet to be found
        self.substitutes: set[int] = set()  # pinned experts that others are computed with
        self.late: set[int] = set()  # pieces whose prefetch was under way
        self.on_host: dict[int, tuple[int, bool]] = {}  # request -> host slot, and is it there?
        self.lent: set[int] = set()  # pieces whose host slots the step keeps
        self.failed = -1
        self.ending = False  # cancelled or failed: it waits for what is moving, then ends

    # ---- the beginning

    def choose(self, event: Routed, requests: Ints) -> None:
        """Ask the cache for these of the routed experts alone."""
        if requests.size < event.experts.size:
            self.array = event.experts[requests]
            self.tokens = None if event.rows is None else event.rows[requests]
            self.weights = None if event.weights is None else event.weights[requests]
            self.exact = self.uncomputed = requests.size

    def begin(self, served: Served) -> None:
        """The cache has given slots to the exact requests."""
        self.served, self.pinned, self._asked = served, served.pinned, self.array
        self.experts: list[int] = self.array.tolist()
        self.slots: Ints = self._placement.tier_slots[served.slots]
        self.hits: list[int] = served.hits.tolist()
        self.ready = [request for request, hit in enumerate(self.hits) if hit]

    def begin_resident(self, served: Served, now: float) -> ComputeGroup:
        """Every request has hit, on one device: they are one group."""
        self.served, self.pinned, self._asked = served, served.pinned, self.array
        self.groups[0], self.began[0] = range(self.exact), now
        return ComputeGroup(self.array, self._placement.tier_slots[served.slots])

    def split(self) -> None:
        """Every request has a top segment, and mostly a bottom one that needs a slot too."""
        extras, secondary_of = self._placement.secondary, self._placement.secondary_of
        self.stage = [EXACT] * len(self.experts)
        self.lacking = [r for r, expert in enumerate(self.experts) if secondary_of(expert) >= 0]
        self._counts.bottoms += len(self.lacking)
        self._counts.bottom_hits += sum(map(extras.whole, self.experts))

    def approximate(self, event: Routed, plan: Plan) -> None:
        """Add the requests whose misses are approximated."""
        placement, first, forms = self._placement, len(self.experts), plan.form.tolist()
        self.array = np.concatenate([self.array, event.experts[plan.request]])
        self.experts = self.array.tolist()
        if self.tokens is not None and event.rows is not None:
            self.tokens = np.concatenate([self.tokens, event.rows[plan.request]])
        self.stage = [EXACT] * first + forms
        low = [r for r, form in enumerate(forms, first) if form == LOW]
        skipped = forms.count(SKIP)
        slots = placement.tier_slots[placement.cache.state.slot_of[plan.weights]]
        slots[plan.form != EXACT] = -1
        self.slots = np.concatenate([self.slots, slots])
        self.uncomputed = len(self.experts)
        self.ready += [r for r, form in enumerate(forms, first) if form != LOW]
        self.lacking = low
        counts = self._counts
        counts.low += len(low)
        counts.low_hits += sum(placement.secondary.whole(self.experts[r]) for r in low)
        counts.left_out += skipped
        counts.substituted += len(forms) - len(low) - skipped

    def leave_on_host(self) -> None:
        """Have requests computed in host memory as soon as their bytes are there."""
        for request, (slot, resident) in self.on_host.items():
            piece = self.experts[request]
            self.slots[request] = slot
            if resident:
                self.lent.add(piece)
                self.ready.append(request)
            else:
                self.missing[piece] = request
                self._transfers.bring_to_host(piece, slot)
        self._counts.on_host += len(self.on_host)

    def present(self) -> set[int]:
        """The step's experts that are where they are computed from."""
        experts = self.array.tolist()
        if not (self.missing or self.waiting or self.lacking or self.on_host):
            return {*experts}
        absent = {piece % self._placement.pieces.experts for piece in self.missing}
        absent |= {experts[r] for r in (*self.waiting, *self.lacking, *self.on_host)}
        return {*experts} - absent

    # ---- slots

    def ask(self, request: int, slot: int) -> None:
        """Demand a request's expert for a slot of the tier."""
        expert = self.experts[request]
        if expert in self.missing:  # it waited for its slot
            del self.missing[expert]
        self.missing[self._transfers.demand(expert, slot)] = request

    def claim_secondary(self) -> None:
        """Give secondary slots to requests whose first slot is theirs, in their order."""
        extras, counts = self._placement.secondary, self._counts
        later = {*self.waiting, *self.blocked.values()}
        for request in [r for r in self.lacking if r not in later]:
            expert = self.experts[request]
            moving, complete = expert in extras.slot_of, extras.whole(expert)
            ahead = extras.awaits_use(expert)
            slot = extras.claim(expert)
            if slot < 0:
                continue
            self.lacking.remove(request)
            self.secondary_slots[request] = slot
            if complete:
                counts.useful += ahead
                self.secondary_landed(request)
                continue
            piece = self._placement.secondary_of(expert)
            if moving:  # a prefetch that is under way; one that was dropped is begun again
                counts.late += not self._transfers.entries[piece].dropped
                self.late.add(piece)
            self.missing[piece] = request
            self._transfers.add(piece, self._placement.secondary_tier_slot(slot))

    def secondary_landed(self, request: int) -> None:
        """A request's bottom segment or copy is there; a bottom waits for its top."""
        if self.stage[request] == LOW:
            self.ready.append(request)

    def stream(self, request: int, slot: int) -> None:
        """Have a request's expert pass through a borrowed slot."""
        piece = self.experts[request]
        self.waiting.remove(request)
        self._placement.buffer.occupy(piece, slot)
        self.passing.add(piece)
        self.missing[piece] = request
        self.slots[request] = self._placement.tier_slots[slot]
        self._transfers.add(piece, int(self.slots[request]))

    # ---- groups

    def next_groups(self, now: float) -> Iterable[ComputeGroup]:
        """Order what is ready, one group on every device, and the host, that computes none now:
        top segments, and bottom ones where no top is."""
        if self._one_place and not (self.stage or self.on_host):
            if self.groups:
                return ()
            requests, self.ready = self.ready, []
            self.groups[0], self.began[0] = requests, now
            return (ComputeGroup(self.array[requests], self.slots[requests]),)
        ready, self.ready = self.ready, []
        groups, orders = self._divided(ready), []
        for device, requests in sorted(groups.items()):
            slots = self.slots[requests]
            if self.part:
                place = self._placement.secondary_tier_slot  # a skipped expert has no slot
                each = [
                    place(self.secondary_slots[r]) if r in self.secondary_slots else -1
                    for r in requests
                ]
                slots = np.array(each, np.int64)
            self.began[device] = now
            orders.append(ComputeGroup(self.array[requests], slots, device, self.part))
        self.groups |= groups
        return orders

    def _divided(self, ready: list[int]) -> dict[int, list[int]]:
        """Requests that are ready, by device; those that must wait for a group go back."""
        if self.stage and not self.groups:
            self.part = min(self.stage[request] for request in ready)
        home, groups = self._placement.home_device, dict[int, list[int]]()
        for request in ready:
            device = HOST if request in self.on_host else home[self.experts[request]]
            later = device in self.groups or (self.stage and self.stage[request] != self.part)
            (self.ready if later else groups.setdefault(device, [])).append(request)
        return groups

    def describe_group(self, device: int, requests: Sequence[int]) -> ComputedGroup:
        """What observers are told of a group."""
        form = EXACT if self._split or not self.stage else self.stage[requests[0]]
        tokens = [1] * len(requests) if self.tokens is None else self.tokens[requests].tolist()
        experts = self.array[requests].tolist()
        return ComputedGroup(self.layer, self.prefill, device, form, experts, tokens)

    def computed(self, requests: Sequence[int]) -> None:
        """A group is computed."""
        if not (self.stage or self.on_host or self.passing or self.waiting or self.blocked):
            self.uncomputed -= len(requests)
            return
        for request in requests:
            if not (self.stage and self.goes_on(request)):
                self.request_over(request)

    def experts_on_host(self) -> set[int]:
        """Experts that the host computes, or will: they are not moved now."""
        return {self.experts[request] for request in self.on_host}

    def goes_on(self, request: int) -> bool:
        """A part of a request is computed: whether its bottom segment follows."""
        extras, expert = self._placement.secondary, self.experts[request]
        if self._split:
            self.stage[request] += 1
            if self.stage[request] == 1 and self._placement.secondary_of(expert) >= 0:
                if request in self.secondary_slots and extras.whole(expert):
                    self.ready.append(request)
                return True
        if request in self.secondary_slots:
            extras.done(expert)
            del self.secondary_slots[request]
        return False

    def request_over(self, request: int) -> None:
        """A request is computed: who waits for its slot may have it."""
        self.uncomputed -= 1
        piece = self.experts[request]
        if request in self.on_host:
            self.lent.remove(piece)
            self._leave_host(piece)
        elif piece in self.passing:
            self.passing.remove(piece)
            self._placement.return_slot(piece)
        elif self.waiting and self.pinned and request < self.exact:
            self.freed.add(piece)
            self._placement.cache.release(self.array[request : request + 1])
        if self.blocked:
            successor = self.blocked.pop(request, None)
            if successor is not None and not self.ending:
                self.ask(successor, int(self.slots[successor]))

    def _leave_host(self, piece: int) -> None:
        assert self._transfers.host is not None
        self._transfers.host.leave(piece, True)

    # ---- the end

    @property
    def landing(self) -> bool:
        """Whether something of the step is computed or on its way yet."""
        return bool(self.groups) or any(p in self._transfers.entries for p in self.missing)

    def end(self) -> None:
        """Let nothing more of the step start."""
        self.ending = True
        self.waiting.clear()
        self.lacking.clear()
        for piece in self.missing:
            if piece in self._transfers.entries:
                self._transfers.queue.drop(piece)

    def close(self) -> None:
        """End all leases, of a step that is computed or was given up."""
        placement, cache, extras = self._placement, self._placement.cache, self._placement.secondary
        if self.pinned:
            asked = self._asked
            if self.freed:
                asked = np.array([e for e in asked.tolist() if e not in self.freed], np.int64)
            cache.release(asked)
        for piece in self.lent:
            self._leave_host(piece)
        for piece in self.passing:
            placement.return_slot(piece)
        for piece in self.missing:
            expert = piece % placement.pieces.experts
            self._transfers.forget_join(piece)
            if placement.is_secondary(piece):
                extras.lose(expert)
            elif cache.state.slot_of[expert] >= 0:
                cache.remove(expert, self.clock)
        for expert in self.substitutes:
            cache.state.pinned[expert] -= 1
        for request in self.secondary_slots:
            if self.experts[request] in extras.slot_of:
                extras.done(self.experts[request])
