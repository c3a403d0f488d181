"""The event machine: every decision of a run, for the runtime and the simulator alike.

`on(event, now) -> actions`. One step is under way at a time. Its requests are accounted one by one
in ascending id, as the cache serves them. Resident experts are computed in the first group,
arrivals in later ones, as many at a time as have landed. A step that needs more slots than there
are reuses them: an expert is loaded only after the one that had its slot earlier in the step is
computed.

The scheduler owns collaborators and calls them; none of them knows it:
 - `Placement`: which expert has which slot; asks the policy
 - `Transfers`: what links carry, and from where
 - `Prefetcher`: predictions, and the loans that they are worth
 - `Step`: the requests under way, and the leases that end with them
 - options: the plan of a step (see `plan`)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from greenroom.core.cache.all_resident import AllResident
from greenroom.core.cache.buffer import BorrowedSlot
from greenroom.core.cache.cache import NOBODY
from greenroom.core.cache.placement import Placement
from greenroom.core.cache.scope import Scope
from greenroom.core.counts import Counts
from greenroom.core.events import (
    Action,
    Cancelled,
    Computed,
    Event,
    Failed,
    Finish,
    Landed,
    Pinned,
    Predicted,
    Resized,
    Routed,
)
from greenroom.core.pieces import Ints, Pieces
from greenroom.core.plan import Option, Plan, overrides
from greenroom.core.policy import Policy
from greenroom.core.prefetch.lookahead import Lookahead
from greenroom.core.prefetch.prefetcher import Prefetcher
from greenroom.core.scheduler.borrowing import Borrowing
from greenroom.core.scheduler.leases import lease
from greenroom.core.scheduler.step import Step
from greenroom.core.scheduler.view import StateView
from greenroom.core.transfers.queue import Entry, Urgency
from greenroom.core.transfers.tiers import HostTier
from greenroom.core.transfers.transfers import Transfers
from greenroom.errors import UsageError

AnyOption = TypeVar("AnyOption", bound=Option)


class Scheduler:
    """Decides over one tier of slots, filled over a link, or a chain of them.

    Where `pieces` has several devices, each has slots, a last link and groups of its own.
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
        staging_slots: int | None = None,
        ahead: int = 0,
        seed: int = 0,
        host: HostTier | None = None,
        options: Sequence[Option] = (),
        after: Scheduler | None = None,
    ) -> None:
        """
        capacity: slots, in whole experts
        lanes:    transfers at a time on each link of the chain
        staging_slots: of a chain; None: as many as its lanes need
        ahead:    slots that may be on loan at a time, at most a quarter of all
        host:     the tier between the two links of a chain
        options:  in the order in which they change a step's plan
        after:    an emptied scheduler, whose predictions and counts this one goes on from
        """
        _check(pieces, pin, ahead, host)
        self.pieces, self.pin, self.options = pieces, pin, tuple(options)
        self.counts: Counts = Counts() if after is None else after.counts
        self._layers = pieces.layers
        self.placement = Placement(pieces, capacity, policy, scope, ahead, seed)
        self.lookahead: Lookahead = Lookahead(pieces) if after is None else after.lookahead
        on_link = self.lookahead.pace.link
        self.transfers = Transfers(
            self.placement, lanes, staging_slots, host, self.counts, options, on_link
        )
        self.prefetcher = Prefetcher(self.lookahead, self.placement, self.transfers, self.counts)
        self._borrowing = Borrowing(self.placement, self.transfers, self.prefetcher, self.counts)
        self.view = StateView(self.placement, self.transfers, self.lookahead.accuracy, self.counts)
        self.step: Step | None = None
        self.all_resident: AllResident | None = None
        self.parts = pieces.split is not None or any(o.approximates for o in options)
        # Whether steps without misses need more than one group of all their experts.
        self._detailed = self.parts or pieces.devices > 1
        self._planners = [o.plan for o in options if overrides(o, "plan")]
        self._observers = [o.computed for o in options if overrides(o, "computed")]
        self._proposers = [o for o in options if overrides(o, "candidates")]
        self._now = 0.0
        self._handlers = {
            Routed: self._routed,
            Predicted: self._predicted,
            Landed: self._landed,
            Failed: self._failed,
            Computed: self._computed,
            Cancelled: self._cancelled,
            Resized: self._resized,
            Pinned: self._pinned,
        }

    @property
    def capacity(self) -> int:
        """Slots that there are now, of whole experts."""
        return self.placement.capacity

    @property
    def policy(self) -> Policy:
        """The policy of its cache."""
        return self.placement.cache.policy

    def residents(self) -> Ints:
        """The experts that have a slot of the cache, ascending."""
        return self.placement.cache.residents()

    def empty(self, now: float) -> None:
        """Forget what is under way and resident; another scheduler goes on from this one."""
        self.prefetcher.retire(now)

    def option(self, kind: type[AnyOption]) -> AnyOption | None:
        """The option of a kind; None where it is off."""
        return next((o for o in self.options if isinstance(o, kind)), None)

    def on(self, event: Event, now: float = 0.0) -> list[Action]:
        """Take an event that happens `now` (seconds), return what to do now, in this order."""
        actions: list[Action] = []
        self._now = now
        self._handlers[type(event)](event, actions)  # type: ignore[operator]
        return actions

    # ---- a step begins (conditions stand in line here: every call of a step is counted)

    def _routed(self, event: Routed, actions: list[Action]) -> None:
        if self.step is not None:
            raise RuntimeError("a step is under way")
        if self.all_resident is not None:
            self._leave_all_resident()
        placement, transfers, counts = self.placement, self.transfers, self.counts
        if transfers.host is not None:
            transfers.host.routed(event)
        lends = placement.buffer.size > 0 or bool(placement.buffer.borrowed)
        expected = self.prefetcher.routed(event, self._now) if lends else None
        plan: Plan | None = None
        for option in self._planners:
            plan = option(event, plan, self.view)
        clock = event.step * self._layers + event.layer
        step = self.step = Step(event, clock, placement, transfers, counts)
        aside, rest = NOBODY, None
        if plan is not None:
            aside, rest = lease(step, event, plan, placement, transfers)
        here, share = self._borrowing.begin(event, step.array) if lends else ({}, -1)
        served = placement.cache.serve(
            step.array,
            clock,
            self.pin,
            request=event.request,
            rows=step.tokens,
            weights=step.weights,
            fill=share,
            aside=aside,
        )
        counts.steps += 1
        counts.requests += event.experts.size
        counts.hits += step.exact - served.misses
        group = None
        if served.misses == 0 and step.exact and not self._detailed:
            group = step.begin_resident(served, self._now)
        else:
            step.begin(served)
            if placement.pieces.split is not None:
                step.split()
            if served.misses:
                self._miss(step, here, lends)
            if rest is not None:
                step.approximate(event, rest)
            if step.lacking:
                step.claim_secondary()
        if expected is not None:
            self.prefetcher.count_in_time(step.layer, step.array.size, step.present(), expected)
        pump = served.misses or placement.secondary.capacity
        if pump or transfers.busy or self.lookahead.candidates or self._proposers:
            self._pump(actions)
        if group is not None:
            actions.append(group)
        else:
            self._advance(actions)

    def _miss(self, step: Step, here: dict[int, BorrowedSlot], lends: bool) -> None:
        """Ask for what is absent: from the host, by what was prefetched, or on demand."""
        absent = [request for request, hit in enumerate(step.hits) if not hit]
        if step.on_host:
            absent = [request for request in absent if request not in step.on_host]
            step.leave_on_host()
        if lends:
            self._borrowing.fetch(step, absent, here)
        else:
            self._demand(step, absent)

    def _demand(self, step: Step, misses: list[int]) -> None:
        """Queue the misses, but for those whose slot an earlier request of the step still needs."""
        holder: dict[int, int] = {}
        wanted = set(misses)
        for request, slot in enumerate(step.slots.tolist()):
            if request in step.on_host:
                continue
            if request in wanted:
                if slot in holder:
                    step.missing[step.experts[request]] = request
                    step.blocked[holder[slot]] = request
                else:
                    step.ask(request, slot)
            holder[slot] = request

    # ---- a step goes on

    def _landed(self, event: Landed | Failed, actions: list[Action]) -> None:
        """A chunk has landed, or failed to."""
        step, placement, ok = self.step, self.placement, type(event) is Landed
        entry = self.transfers.land(event.link, event.lane, ok, self._now)
        if entry.finished:
            self._gone(entry)
        elif entry.failed:
            self._give_up(entry)
        waits = step is not None and (step.waiting or step.lacking)
        if waits or self.transfers.busy or self.lookahead.candidates or self._proposers:
            self._pump(actions)
        if step is not None:
            self._advance(actions)
        if self.step is None and placement.wanted != placement.capacity:
            self._settle(actions)

    def _failed(self, event: Failed, actions: list[Action]) -> None:
        entry = self.transfers.entries[event.piece]
        self.counts.failed += entry.urgency is Urgency.PREFETCH and not entry.dropped
        self._landed(event, actions)

    def _gone(self, entry: Entry) -> None:
        """A transfer has ended: complete, failed, or dropped."""
        piece, step, placement = entry.piece, self.step, self.placement
        asked = step is not None and piece in step.missing
        request = step.missing[piece] if step is not None and asked else -1
        if entry.arrived:
            if placement.secondary.capacity and placement.is_secondary(piece):
                placement.secondary.landed(piece - self.pieces.experts)
                if step is not None and request >= 0:
                    del step.missing[piece]
                    step.secondary_landed(request)
            elif step is not None and request >= 0:
                del step.missing[piece]
                step.ready.append(request)
                if entry.host_only:
                    step.lent.add(piece)
            elif entry.dropped:
                placement.return_slot(piece)
            else:
                self.prefetcher.landed(piece)
        elif step is not None and request >= 0:
            if entry.upgraded and not step.ending:  # a failed prefetch: the demand tries itself
                self.transfers.add(piece, entry.slot)
            else:
                self._give_up(entry)
        else:
            placement.vacate(piece)

    def _give_up(self, entry: Entry) -> None:
        """A demand has failed, and so has its step, unless it was over before."""
        step = self.step
        asked = step is not None and entry.piece in step.missing
        if step is not None and asked and not (entry.upgraded or step.ending):
            step.failed = entry.piece
            step.end()

    def _computed(self, event: Computed, actions: list[Action]) -> None:
        step = self.step
        if step is None or event.device not in step.groups:
            raise RuntimeError("no group was ordered")
        requests = step.groups.pop(event.device)
        if self._observers:
            group = step.describe_group(event.device, requests)
            seconds = self._now - step.began[event.device]
            for computed in self._observers:
                computed(group, seconds, self.view)
        step.computed(requests)
        waits = step.waiting or step.lacking
        if waits or self.transfers.busy or self.lookahead.candidates or self._proposers:
            self._pump(actions)
        self._advance(actions)

    def _pump(self, actions: list[Action]) -> None:
        """Give every idle lane a chunk: of demands, of prefetches under way, of new ones."""
        step, transfers = self.step, self.transfers
        if step is not None:
            if step.waiting:
                self._borrowing.stream(step)
            if step.lacking:
                step.claim_secondary()
        if transfers.busy:
            transfers.start(actions, self._now)
        waits = step is not None and (step.waiting or step.lacking)
        placement = self.placement
        if not placement.buffer.size or waits or placement.wanted != placement.capacity:
            return
        if self.lookahead.candidates or self._proposers:
            busy = step.experts_on_host() if step is not None and step.on_host else ()
            begin, promote = self.prefetcher.begin_next, self.prefetcher.promote
            while begin(busy) or promote(self._proposers, self.view):
                transfers.start(actions, self._now)

    def _advance(self, actions: list[Action]) -> None:
        """Order the next groups, or finish."""
        step = self.step
        if step is None:
            return
        if step.ending:
            if not step.landing:
                self._finish(step, actions)
        elif step.ready:
            actions += step.next_groups(self._now)
        elif step.uncomputed == 0:
            self._finish(step, actions)

    # ---- a step ends

    def _cancelled(self, event: Cancelled, actions: list[Action]) -> None:
        if self.step is not None:
            self.step.groups.clear()
            self.step.end()
            self._advance(actions)

    def _finish(self, step: Step, actions: list[Action]) -> None:
        step.close()
        self.step = None
        if self.placement.wanted != self.placement.capacity:
            self._settle(actions)
        if self.transfers.busy or self.lookahead.candidates or self._proposers:
            self._pump(actions)
        actions.append(Finish(step.failed))
        if self.placement.holds_all:
            self.all_resident = AllResident.of(self.placement, self.counts)

    # ---- between steps

    def _predicted(self, event: Predicted, actions: list[Action]) -> None:
        if self.placement.buffer.size:
            self.prefetcher.predicted(event)
            self._pump(actions)

    def _pinned(self, event: Pinned, actions: list[Action]) -> None:
        self.placement.cache.pin(event.pieces)

    def _resized(self, event: Resized, actions: list[Action]) -> None:
        """A resize waits for the end of the step under way, and for what is being prefetched."""
        self.placement.resize(event.capacity, event.ahead)
        self.transfers.busy = True  # with loans again, the pace of links is to be told
        self._settle(actions)

    def _settle(self, actions: list[Action]) -> None:
        """Resize, as soon as nothing is in the way."""
        if self.step is not None or not self.placement.resizing:
            return
        self._leave_all_resident()
        self.prefetcher.abandon()
        if not self.transfers.entries:
            actions += self.placement.apply_resize()

    def _leave_all_resident(self) -> None:
        """Have the policy told of the uses that only the all-resident path knows of."""
        if self.all_resident is not None:
            self.all_resident.tell()
            self.all_resident = None


def _check(pieces: Pieces, pin: str, ahead: int, host: HostTier | None) -> None:
    """UsageError for settings that exclude each other."""
    if ahead and pin != "step":
        raise UsageError("prefetching needs the experts of a step to be pinned: pin step")
    for what, kind in (("split experts", pieces.split), ("low-precision copies", pieces.copies)):
        if host is not None and kind is not None:
            raise UsageError(f"{what} have no tier between two links: leave out one of them")
