"""The scheduler: an event machine that decides about experts, in runs and simulations.

`on(event, now) -> actions`. One step, one pass at one layer, is under way at a time. Its requests
are counted in ascending id, as the cache serves them. Resident experts are computed in the first
expert group, the others in later groups, as they arrive. A step that needs more slots than there
are reuses them: an expert is loaded only after the expert that had its slot has been computed.

The scheduler owns these objects and calls them; none of them knows the scheduler:
 - `Placement`: which expert has which slot (calls the policy); `Transfers`: the queue and its links
 - `Prefetcher`: predictions, and the prefetches that are worth their cost
 - `Step`: the requests of the current step, and its leases; options: its plan (see `plan`)"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from greenroom.core.cache.buffer import BorrowedSlot
from greenroom.core.cache.cache import NO_FLAGS
from greenroom.core.cache.placement import Placement
from greenroom.core.cache.scope import Scope
from greenroom.core.counts import Counts
from greenroom.core.events import (
    HOST,
    Action,
    Cancelled,
    Computed,
    Event,
    Failed,
    Finish,
    HostComputed,
    Idle,
    Landed,
    Pinned,
    Predicted,
    Resized,
    Routed,
)
from greenroom.core.pieces import Ints, Pieces
from greenroom.core.plan import ComputedGroup, Option, StepPlan
from greenroom.core.policy import Policy
from greenroom.core.prefetch.lookahead import Lookahead
from greenroom.core.prefetch.prefetcher import Prefetcher
from greenroom.core.scheduler.borrowing import Borrowing
from greenroom.core.scheduler.checks import check_settings
from greenroom.core.scheduler.demands import demand
from greenroom.core.scheduler.leases import lease
from greenroom.core.scheduler.option_calls import OptionCalls
from greenroom.core.scheduler.resident_steps import ResidentSteps
from greenroom.core.scheduler.step import Step
from greenroom.core.scheduler.view import StateView
from greenroom.core.transfers.queue import Entry, Urgency
from greenroom.core.transfers.tiers import HostTier
from greenroom.core.transfers.transfers import Transfers

AnyOption = TypeVar("AnyOption", bound=Option)


class Scheduler:
    """The event-driven state machine that decides which experts are cached, fetched and computed.

    One device has one memory of expert slots, filled over a link or a chain of links (disk, host
    memory, GPU). Of several devices each has its own slots, last link and expert groups."""

    step: Step | None = None  # under way

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
        lookahead: Lookahead | None = None,
        after: Scheduler | None = None,
    ) -> None:
        """Build a scheduler with an empty cache.

        capacity: cache slots, counted in unsplit experts
        pin:      "step": the experts of a step are not evicted while it lasts; "none": they may be
        lanes, staging_slots: transfers at a time on each link; None: as many as the lanes need
        ahead:    slots that may be borrowed at a time, at most a quarter of all
        host:     the cache in host memory, between the two links of a chain
        options:  in the order in which they change a step's plan
        lookahead: the choice of prefetches; None: by expected time saved
        after:    an emptied scheduler, whose counts and prediction statistics are continued"""
        check_settings(pieces, pin, ahead, options)
        self.pieces, self._layers = pieces, pieces.layers
        self.pin, self.options, self.option_calls = pin, tuple(options), OptionCalls(options)
        self.counts: Counts = Counts() if after is None else after.counts
        self.placement = Placement(pieces, capacity, policy, scope, ahead, seed)
        self.lookahead: Lookahead = after.lookahead if after else lookahead or Lookahead(pieces)
        self.transfers = Transfers(
            self.placement, lanes, staging_slots, host, self.counts, options,
            self.lookahead.pace.link,
        )  # fmt: skip
        self.prefetcher = Prefetcher(self.lookahead, self.placement, self.transfers, self.counts)
        self.idle, self._now = self.prefetcher.idle, 0.0
        self._borrowing = Borrowing(self.placement, self.transfers, self.prefetcher, self.counts)
        self.view = StateView(self.placement, self.transfers, self.prefetcher, self.counts)
        self.groups_have_parts = pieces.split is not None or any(o.approximates for o in options)
        self._detailed = self.groups_have_parts or pieces.devices > 1  # several groups, no misses
        calls, self._proposers = self.option_calls, self.option_calls.proposers
        self.prefetcher.drops_unused = not calls.step_class.keeps_prefetches
        self.resident_steps = ResidentSteps(
            self.placement, self.transfers, self.prefetcher, self.counts,
            self._detailed or calls.decide_steps, pin, calls.share(self.view),
        )  # fmt: skip
        self._handlers = self._handlers_by_event()

    def _handlers_by_event(self) -> dict[type[Event], Callable[..., None]]:
        return {
            Routed: self._routed,
            HostComputed: self._host_computed,
            Predicted: self._predicted,
            Landed: self._landed,
            Failed: self._failed,
            Computed: self._computed,
            Cancelled: self._cancelled,
            Resized: self._resized,
            Pinned: self._pinned,
            Idle: self._idle,
        }

    @property
    def capacity(self) -> int:
        """The current number of expert slots, counted in unsplit experts."""
        return self.placement.capacity

    @property
    def policy(self) -> Policy:
        """The eviction policy of the expert cache."""
        return self.placement.cache.policy

    def residents(self) -> Ints:
        """The experts that have a cache slot of their own (not borrowed), ascending."""
        return self.placement.cache.residents()

    def empty(self, now: float) -> None:
        """Empty the cache and end its prefetches, before another scheduler continues the counts."""
        self.prefetcher.retire(now)

    def option(self, kind: type[AnyOption]) -> AnyOption | None:
        """Find the scheduler's option of a given class; None if the option is off."""
        return next((o for o in self.options if isinstance(o, kind)), None)

    def on(self, event: Event, now: float = 0.0) -> list[Action]:
        """Handle an event at the time `now` in seconds; return the actions in their order."""
        actions: list[Action] = []
        self._now = now
        self._handlers[type(event)](event, actions)
        return actions

    # ---- a step begins (conditions are inlined here: calls take a large part of a step's time)

    def _routed(self, event: Routed, actions: list[Action]) -> None:
        if self.step is not None:
            raise RuntimeError("event Routed during a step: the step must finish first")
        if self.resident_steps.path is not None:
            self.resident_steps.leave_path()
        placement, transfers, counts = self.placement, self.transfers, self.counts
        if self.idle.observes:
            self.idle.routed(event.experts)
        if transfers.host is not None:
            transfers.host.routed(event)
        borrows = placement.buffer.size > 0 or bool(placement.buffer.borrowed)
        if borrows:
            self.prefetcher.routed(event, self._now)
        plan: StepPlan | None = None
        for option in self.option_calls.planners:
            plan = option(event, plan, self.view)
        clock = event.step * self._layers + event.layer
        step = self.step = self.option_calls.step_class(event, clock, placement, transfers, counts)
        without_slot, approximated = NO_FLAGS, None
        if plan is not None:
            without_slot, approximated = lease(step, event, plan, placement, transfers)
        prefetched, share = self._borrowing.begin(event, step) if borrows else ({}, -1)
        if step.reuses_slots and prefetched:
            without_slot = self._borrowing.moving(step, prefetched)
        served = placement.cache.serve(
            step.array, clock, "none" if step.reuses_slots else self.pin, request=event.request,
            prefill=event.prefill, rows=step.tokens, weights=step.weights, fill=share,
            without_slot=without_slot,
        )  # fmt: skip
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
                self._miss(step, prefetched, borrows)
            if approximated is not None:
                step.approximate(event, approximated)
            if step.awaiting_secondary:
                step.claim_secondary()
            if event.computed:
                step.take_computed(event.computed, self._now)
        pump = served.misses or placement.secondary.capacity
        if pump or transfers.busy or self.lookahead.candidates or self._proposers:
            self._pump(actions)
        if group is not None:
            actions.append(group)
        elif step.expert_groups:
            self._computed(Computed(), actions)
        else:
            self._advance(actions)

    def _miss(self, step: Step, prefetched: dict[int, BorrowedSlot], borrows: bool) -> None:
        """Obtain a step's missing experts: on the host, from prefetches, or on demand."""
        absent = [request for request, hit in enumerate(step.hits) if not hit]
        if step.on_host:
            absent = [request for request in absent if request not in step.on_host]
            step.compute_on_host()
        if step.reuses_slots:
            demand(step, self._borrowing.take_moving(step, absent, prefetched))
        elif borrows:
            self._borrowing.fetch(step, absent, prefetched)
        else:
            demand(step, absent)

    def _host_computed(self, event: HostComputed, actions: list[Action]) -> None:
        """End the host's part of a step that was served without events."""
        self.resident_steps.release_host()
        if event.seconds:
            group = ComputedGroup.of_token(event.layer, HOST, event.experts)
            for computed in self.option_calls.observers:
                computed(group, event.seconds, self.view)
        self._pump(actions)

    # ---- a step continues

    def _landed(self, event: Landed | Failed, actions: list[Action]) -> None:
        """Handle a chunk that has landed, or failed to."""
        step, placement, ok = self.step, self.placement, type(event) is Landed
        entry = self.transfers.land(event.link, event.lane, ok, self._now)
        if entry.finished:
            self._finish_transfer(entry)
        elif entry.failed:
            self._fail_step(entry)
        waits = step is not None and (step.waiting or step.awaiting_secondary)
        if waits or self.transfers.busy or self.lookahead.candidates or self._proposers:
            self._pump(actions)
        if step is not None:
            self._advance(actions)
        if self.step is None and placement.resizing:
            self._try_resize(actions)

    def _failed(self, event: Failed, actions: list[Action]) -> None:
        entry = self.transfers.entries[event.piece]
        self.counts.failed += entry.urgency is Urgency.PREFETCH and not entry.dropped
        self._landed(event, actions)

    def _finish_transfer(self, entry: Entry) -> None:
        """Handle the end of a transfer: complete, failed, or dropped."""
        piece, step, placement = entry.piece, self.step, self.placement
        demanded = step is not None and piece in step.missing
        request = step.missing[piece] if step is not None and demanded else -1
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
                    step.host_leases.add(piece)
            elif entry.dropped:
                placement.return_slot(piece)
            else:
                self.prefetcher.landed(piece)
        elif step is not None and request >= 0:
            if entry.upgraded and not step.aborted:  # a prefetch has failed: try again as a demand
                self.transfers.add(piece, entry.slot)
            else:
                self._fail_step(entry)
        else:
            placement.vacate(piece)

    def _fail_step(self, entry: Entry) -> None:
        """Fail the step whose demand has failed, unless it is aborted already."""
        step = self.step
        failed = step is not None and entry.piece in step.missing
        if step is not None and failed and not (entry.upgraded or step.aborted):
            step.failed = entry.piece
            step.abort()

    def _computed(self, event: Computed, actions: list[Action]) -> None:
        step = self.step
        if step is None or event.device not in step.expert_groups:
            raise RuntimeError(f"event Computed: device {event.device} computes no expert group")
        requests = step.expert_groups.pop(event.device)
        if self.option_calls.observers:
            group = step.describe_group(event.device, requests)
            seconds = self._now - step.start_times[event.device]
            for computed in self.option_calls.observers:
                computed(group, seconds, self.view)
        step.computed(requests)
        waits = step.waiting or step.awaiting_secondary
        if waits or self.transfers.busy or self.lookahead.candidates or self._proposers:
            self._pump(actions)
        self._advance(actions)

    def _pump(self, actions: list[Action]) -> None:
        """Start chunks on all idle lanes: of demands, of current prefetches, of new ones."""
        step, transfers = self.step, self.transfers
        if step is not None:
            if step.waiting:
                self._borrowing.stream(step)
            if step.awaiting_secondary:
                step.claim_secondary()
        if transfers.busy:
            transfers.start(actions, self._now)
        waits = step is not None and (step.waiting or step.awaiting_secondary)
        placement = self.placement
        while self.idle.candidates and self.idle.begin_next():
            transfers.start(actions, self._now)
        if not placement.buffer.size or waits or placement.resizing:
            return
        if self.lookahead.candidates or self._proposers:
            busy = step.experts_on_host() if step is not None else self.resident_steps.on_host
            begin, promote = self.prefetcher.begin_next, self.prefetcher.promote
            while begin(busy) or promote(self._proposers, self.view):
                transfers.start(actions, self._now)

    def _advance(self, actions: list[Action]) -> None:
        """Order the next groups, or finish the step."""
        step = self.step
        if step is None:
            return
        if step.aborted:
            if not step.landing:
                self._finish(step, actions)
        elif step.ready:
            actions += step.next_groups(self._now)
        elif step.uncomputed == 0:
            self._finish(step, actions)

    # ---- a step ends

    def _cancelled(self, event: Cancelled, actions: list[Action]) -> None:
        if self.step is not None:
            self.step.expert_groups.clear()
            self.step.abort()
            self._advance(actions)

    def _finish(self, step: Step, actions: list[Action]) -> None:
        step.close()
        self.step = None
        if self.placement.resizing:
            self._try_resize(actions)
        if self.transfers.busy or self.lookahead.candidates or self._proposers:
            self._pump(actions)
        actions.append(Finish(step.failed))
        if self.placement.holds_all:
            self.resident_steps.enter_path()

    # ---- between steps

    def _predicted(self, event: Predicted, actions: list[Action]) -> None:
        if self.placement.buffer.size:
            self.prefetcher.predicted(event)
            self._pump(actions)

    def _pinned(self, event: Pinned, actions: list[Action]) -> None:
        self.placement.cache.pin(event.pieces)

    def _idle(self, event: Idle, actions: list[Action]) -> None:
        self.idle.begin(event.experts)
        self._pump(actions)

    def _resized(self, event: Resized, actions: list[Action]) -> None:
        """Request a resize, which waits for the current step and for prefetches under way."""
        self.placement.resize(event.capacity, event.ahead, event.scope, event.devices)
        self.transfers.busy = True  # slots may be borrowed again: update the pace of links
        self._try_resize(actions)

    def _try_resize(self, actions: list[Action]) -> None:
        """Resize as soon as no step and no transfer is under way."""
        if self.step is not None or not self.placement.resizing:
            return
        self.resident_steps.leave_path()
        self.prefetcher.abandon()
        if not self.transfers.entries:
            actions += self.placement.apply_resize()
