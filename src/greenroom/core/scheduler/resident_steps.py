"""Steps that wait for no transfer: served at once, as the scheduler's events would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from greenroom.core.cache.all_resident import AllResident
from greenroom.core.cache.cache import NO_PIECES
from greenroom.core.cache.placement import Placement
from greenroom.core.counts import Counts
from greenroom.core.events import Routed
from greenroom.core.pieces import Ints
from greenroom.core.prefetch.prefetcher import Prefetcher
from greenroom.core.transfers.tiers import HostTier
from greenroom.core.transfers.transfers import Transfers
from greenroom.interrupts import hold_interrupts


class Loads:
    """A step's experts that move from host memory to slots.

    numbers: [3, n]; of each expert its id in the model, the slot that it gets, its slot in host
             memory
    size:    how many move
    """

    __slots__ = ("numbers", "size")

    def __init__(self, numbers: Ints) -> None:
        self.numbers, self.size = numbers, numbers.shape[1]

    @property
    def pieces(self) -> list[int]:
        """Return their ids in the model."""
        pieces: list[int] = self.numbers[0].tolist()
        return pieces

    @property
    def slots(self) -> list[int]:
        """Return the slots that they get."""
        slots: list[int] = self.numbers[1].tolist()
        return slots

    @property
    def host_slots(self) -> list[int]:
        """Return their slots in host memory."""
        slots: list[int] = self.numbers[2].tolist()
        return slots


class Misses(NamedTuple):
    """A step's missing experts: those that move to slots, and those that the host computes.

    on_host:    ids in the model
    host_slots: their slots in host memory
    """

    loads: Loads
    on_host: Sequence[int] = ()
    host_slots: Sequence[int] = ()


class ResidentSteps:
    """Serves steps without events, while nothing but the eviction policy decides.

    Their experts are all resident, or a device loads the others in order with its computation. The
    host may compute some of these. What it has computed before may be on its way to slots.

    path:    records the steps of an LRU cache with a slot for every expert; None: another cache
    on_host: experts of the latest step that the host computes, until it has ended
    """

    path: AllResident | None = None
    on_host: Sequence[int] = ()
    _pinned: Ints = NO_PIECES  # of the step that a thread computes

    def __init__(
        self,
        placement: Placement,
        transfers: Transfers,
        prefetcher: Prefetcher,
        counts: Counts,
        needs_events: bool,
        pin: str,
        share: Callable[[Sequence[int], int], int] | None,
    ) -> None:
        """Connect the scheduler's parts.

        needs_events: its options decide about every step
        share:        see `Option.share`; None: the host computes nothing
        """
        self._placement, self._transfers, self._counts = placement, transfers, counts
        self._prefetcher, self._cache = prefetcher, placement.cache
        policy = self._cache.policy
        # The policy needs no rows or gate weights, and inserts what is missing.
        self._can_load = pin == "step" and not policy.weighs and policy.preload is None
        self._lookahead, self._idle = prefetcher.lookahead, prefetcher.idle
        self._needs_events, self._layers = needs_events, placement.pieces.layers
        self._share = share
        self._is_lru = policy.name == "lru"

    def serve(self, event: Routed, now: float) -> Ints | None:
        """Serve a step at the time `now`; return the slots of its experts in memory.

        Returns None, and counts nothing, if an expert is missing or there is more to decide. No
        step may be under way.
        """
        if self.path is not None:
            return self.path.step(event.experts)
        placement, cache = self._placement, self._cache
        if self._decides_more(event.experts):
            return None
        if placement.buffer.size:  # the prediction is compared with the cache before the step
            if event.prefill or -1 in cache.state.slot_of[event.experts].tolist():
                return None
            self._compare(event, now)
        slots = cache.serve_hits(
            event.experts, event.layer, event.step, event.request, event.prefill, event.rows,
            event.weights,
        )  # fmt: skip
        if slots is None:
            return None
        self._counts.steps += 1
        self._counts.requests += slots.size
        self._counts.hits += slots.size
        place: Ints = placement.tier_slots[slots]
        return place

    def serve_pinned(self, event: Routed, now: float) -> Ints | None:
        """Serve a step like `serve`, and pin its experts until `unpin`.

        A thread computes from their slots. A prediction of another one may evict experts meanwhile.
        """
        self.unpin()  # in case of an interrupt
        slots = self.serve(event, now)
        if slots is not None and self.path is None and self._placement.buffer.size:
            self._cache.pin_step(event.experts)
            self._pinned = event.experts  # last: an interrupt comes before the pins or behind this
        return slots

    def unpin(self) -> None:
        """End what `serve_pinned` has begun, if it has pinned anything."""
        if self._pinned.size:
            self._cache.release(self._pinned)
            self._pinned = NO_PIECES

    @property
    def unfinished(self) -> bool:
        """Tell whether a step has pinned experts, or leased slots of host memory."""
        return bool(self.on_host) or self._pinned.size > 0

    def abandon(self) -> None:
        """End a step that an interrupt has left unfinished."""
        self.unpin()
        self.release_host()

    def report(self) -> None:
        """Report the served steps to the policy now; else it learns of them at the next miss."""
        self._cache.report_hits()

    def _decides_more(self, experts: Ints) -> bool:
        """Tell whether more than the eviction policy decides about a step."""
        placement, idle = self._placement, self._idle
        return bool(
            self._needs_events
            or placement.resizing
            or (placement.holds_all and self._is_lru)  # an event begins the path
            or idle.observes
            or idle.candidates
            or self._lookahead.candidates
            or self._is_disturbed(experts)
        )

    def _is_disturbed(self, experts: Ints) -> bool:
        """Tell whether transfers are under way that may concern a step.

        Where the host computes missing experts, it goes on beside transfers of others, if these
        leave slots for the step.
        """
        borrowed, transfers, cache = self._placement.buffer.borrowed, self._transfers, self._cache
        if not (transfers.busy or borrowed):
            return False
        if self._share is None or not experts.size:
            return True
        size = cache.sizes[cache.state.group_of[experts[0]]]
        if experts.size + len(borrowed) > size:
            return True
        entries = transfers.entries
        return any(expert in borrowed or expert in entries for expert in experts.tolist())

    def load(self, event: Routed, now: float) -> Misses | None:
        """Serve a step whose missing experts are all in host memory; return these.

        The caller loads them at once: no event says that they arrive. The event `HostComputed`
        follows if the host computes some. Returns None, and counts nothing, if one is not in host
        memory or there is more to decide. No step may be under way.
        """
        placement, cache, host = self._placement, self._cache, self._transfers.host
        if (
            host is None
            or event.prefill
            or not self._can_load
            or self._decides_more(event.experts)
            or cache.pinned_set.size
            or not event.experts.size
        ):
            return None
        moved, shares = -1, self._share is not None and not event.device_only  # -1: all
        if placement.buffer.size or shares:
            missing = event.experts[cache.state.slot_of[event.experts] < 0]
            if (host.slot_of[missing] < 0).any() or not cache.fits(event.experts):
                return None
            if placement.buffer.size:  # the prediction is compared with the cache before the step
                self._compare(event, now)
            if shares and missing.size:
                moved = self._moved(missing.tolist(), event.experts.size)
        served = cache.load(
            event.experts, event.layer, event.step, event.request, host.slot_of,
            placement.tier_slots, moved,
        )  # fmt: skip
        if served is None:
            return None
        counts, requests, misses = self._counts, event.experts.size, served.shape[1]
        counts.steps += 1
        counts.requests += requests
        counts.hits += requests - misses
        if 0 <= moved < misses:
            return self._divide(served, moved, host, event)
        host.use(served[0], event)
        return Misses(Loads(served))

    def _compare(self, event: Routed, now: float) -> None:
        """Compare the prediction of a step with its routing, and drop other prefetches.

        Those under way, as of host computation, must not be left half dropped by an interrupt.
        """
        if self._transfers.busy or self._placement.buffer.borrowed:
            with hold_interrupts():
                self._prefetcher.routed(event, now)
        else:
            self._prefetcher.routed(event, now)

    def _moved(self, missing: Sequence[int], experts: int) -> int:
        """Return how many missing experts of a step are moved, and not computed by the host."""
        assert self._share is not None
        return len(missing) - self._share(missing, experts - len(missing))

    def _divide(self, served: Ints, moved: int, host: HostTier, event: Routed) -> Misses:
        """Leave all missing experts but the first ones to the host."""
        on_host, _, host_slots = served[:, moved:].tolist()
        self.on_host = on_host
        host.routed(event)
        for piece in on_host:
            host.request(piece)
        self._counts.on_host += len(on_host)
        loads = Loads(np.ascontiguousarray(served[:, :moved]))
        host.use(loads.numbers[0], event)
        return Misses(loads, on_host, host_slots)

    def undo(self, misses: Misses, event: Routed) -> None:
        """Take back what `load` has done, for a step that failed."""
        for piece in misses.loads.pieces:
            self._cache.remove(piece, event.step * self._layers + event.layer)
        self.release_host()

    def release_host(self) -> None:
        """Release the slots in host memory from which the host has computed."""
        experts, self.on_host = self.on_host, ()
        if experts:
            host = self._transfers.host
            assert host is not None
            for expert in experts:
                host.release(expert, True)

    def enter_path(self) -> None:
        """Let the path record later steps, if the cache is an LRU cache."""
        self.path = self._idle.all_resident = AllResident.of(self._placement, self._counts)

    def leave_path(self) -> None:
        """Report the steps that the path has recorded to the policy."""
        if self.path is not None:
            self._idle.leave_all_resident()
            self.path.report()
            self.path = None
