"""Read-only access to the scheduler's state, for its options and for drivers.

Drivers are the objects that run the scheduler: the runtime and the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum

import numpy as np

from greenroom.core.cache.buffer import BorrowState
from greenroom.core.cache.learned import export_learned, restore_learned
from greenroom.core.cache.placement import Placement
from greenroom.core.cache.reshape import check_new_devices, check_new_scope
from greenroom.core.cache.scope import Scope
from greenroom.core.cache.state import pool_sizes
from greenroom.core.counts import Counts
from greenroom.core.events import StartChunk
from greenroom.core.pieces import Ints
from greenroom.core.plan import Flags, TransferStatus
from greenroom.core.policy import Arrays
from greenroom.core.prefetch.prefetcher import Prefetcher
from greenroom.core.transfers.transfers import Transfers


class ExpertState(IntEnum):
    """State of an expert, for displays: absent, in flight, prefetched or resident."""

    ABSENT = 0
    IN_FLIGHT = 1
    PREFETCHED = 2  # in a borrowed slot, and not used yet
    RESIDENT = 3


class StateView:
    """Read-only access to the scheduler's state, for its options and for drivers.

    It is the `View` that options get, with further properties for drivers (runtime and simulator).
    Only `restore_learned`, `hold_prefetches` and `count_rerouted` change anything. A driver sets
    `pinned_sets`.

    pinned_sets:   sets of experts that may be pinned later, one at a time; a resize has room for
                   each of them
    accuracy:      the accuracy of predictions
    forecast:      the method of `Lookahead` that returns a layer's predicted experts
    lanes:         how many transfers each link carries at a time
    staging_slots: the number of staging slots, which hold chunks between two links
    sources:       for each device, the number of the first link of its path
    """

    pinned_sets: Sequence[Ints] = ()

    def __init__(
        self, placement: Placement, transfers: Transfers, prefetcher: Prefetcher, counts: Counts
    ) -> None:
        lookahead = prefetcher.lookahead
        self.pieces, self.accuracy = placement.pieces, lookahead.accuracy
        self.forecast = lookahead.forecast
        self._placement, self._transfers, self._counts = placement, transfers, counts
        self._idle = prefetcher.idle
        queue = transfers.queue
        self.lanes, self.staging_slots = queue.lanes, queue.staging_slots
        self.sources = queue.sources

    # ---- for drivers

    def counted(self) -> Counts:
        """Return a copy of the scheduler's counters of hits, misses and prefetches."""
        used = self._counts.idle_used + self._idle.used_by_path()
        return replace(self._counts, idle_used=used)

    @property
    def misses(self) -> int:
        """The number of requests for experts that missed the cache, since the start."""
        return self._counts.misses

    @property
    def slots(self) -> int:
        """The number of cache slots for unsplit experts or for top segments."""
        return self._placement.cache.capacity

    @property
    def scope(self) -> Scope:
        """The scope of the expert cache: which layers share slots."""
        return self._placement.cache.scope

    @property
    def resizing(self) -> bool:
        """Tell whether a requested resize of the cache is still pending."""
        return self._placement.resizing

    @property
    def borrow_limit(self) -> int:
        """The largest number of cache slots that prefetches may borrow at a time."""
        return self._placement.buffer.size

    @property
    def free_slots(self) -> int:
        """The number of cache slots without an expert."""
        return int(self._placement.cache.state.free_count.sum())

    def group_sizes(self) -> list[int]:
        """Return the number of cache slots of each group of layers that share slots.

        Slots of all devices are added up.
        """
        each = np.reshape(self._placement.cache.sizes, (self.pieces.devices, -1))
        sizes: list[int] = each.sum(axis=0).tolist()
        return sizes

    def sizes_after_resize(
        self, capacity: int, scope: Scope | None, devices: Sequence[int] | None
    ) -> list[int] | None:
        """Check a resize of the cache, as `check_capacity` does, before memory is changed for it.

        Returns the number of slots of each pool in memory if `devices` are to have all experts.
        """
        self.check_capacity(capacity, scope=scope, devices=devices)
        if devices is None:
            return None
        return pool_sizes(self.pieces.on_devices(devices), capacity, self.scope)

    def check_capacity(
        self,
        capacity: int,
        pinned_set: Ints | None = None,
        scope: Scope | None = None,
        devices: Sequence[int] | None = None,
    ) -> None:
        """Check that a cache capacity leaves each slot group an unpinned slot.

        capacity:   the number of cache slots, counted in unsplit experts
        pinned_set: the experts that are never evicted; None: the present set, and `pinned_sets`
        scope:      how layers are to divide the slots; None: as now
        devices:    those that are to have all experts; None: the present ones

        BudgetError if a slot group would have only pinned experts. UsageError for a scope that the
        cache cannot change to, or for unknown devices.
        """
        cache = self._placement.cache
        pinned = (cache.pinned_set, *self.pinned_sets) if pinned_set is None else (pinned_set,)
        for each in pinned:
            if devices is not None:
                check_new_devices(cache, capacity, devices, each)
            elif scope is not None:
                check_new_scope(cache, capacity, scope, each)
            else:
                cache.sizes_for(capacity, each)

    def export_learned(self) -> Arrays:
        """Export what the eviction policy has learned; empty if it learns nothing."""
        return export_learned(self._placement.cache)

    def restore_learned(self, arrays: Arrays) -> None:
        """Restore what the eviction policy has learned; ValueError if it does not fit."""
        restore_learned(self._placement.cache, arrays)

    @property
    def demands(self) -> int:
        """The number of transfers under way that a step waits for."""
        return self._transfers.queue.demands

    def is_moving(self, action: StartChunk) -> bool:
        """Tell whether a chunk is on its lane: it has neither landed nor failed."""
        return self._transfers.queue.is_moving(action)

    def expert_states(self) -> Ints:
        """Return the state of each expert: absent, in flight, prefetched or resident.

        Any thread may call this method at any time: it takes no lock, and a state may be a moment
        old. A split expert counts as its top segment does.
        """
        placement, experts = self._placement, self.pieces.experts
        resident = placement.cache.state.slot_of >= 0
        states = np.where(resident, ExpertState.RESIDENT, ExpertState.ABSENT)
        for entry in list(placement.buffer.borrowed.values()):
            used = entry.state is BorrowState.IN_USE
            states[entry.piece] = ExpertState.RESIDENT if used else ExpertState.PREFETCHED
        moving = [piece for piece in list(self._transfers.queue.entries) if piece < experts]
        states[moving] = ExpertState.IN_FLIGHT
        return states

    def queue_lengths(self) -> list[tuple[int, int, int]]:
        """Return each link's numbers of waiting demands, waiting prefetches, and moving chunks.

        Any thread may call this method at any time.
        """
        return self._transfers.queue.lengths()

    def hold_prefetches(self, hold: bool) -> None:
        """Let prefetches start no reads from disk, because another reader goes before them.

        They start again, without the hold, at the scheduler's next event.
        """
        self._transfers.queue.holds_prefetches = hold

    def count_rerouted(self, requests: int) -> None:
        """Count requests of experts for tokens whose router preferred others."""
        self._counts.rerouted += requests

    # ---- for options

    def resident(self, experts: Ints) -> Flags:
        flags: Flags = self._placement.cache.state.slot_of[experts] >= 0
        return flags

    def in_slots(self, layer: int) -> Flags:
        first, end = self.pieces.offsets[layer : layer + 2]
        placement = self._placement
        flags: Flags = placement.cache.state.slot_of[first:end] >= 0
        for entry in list(placement.buffer.borrowed.values()):
            if first <= entry.piece < end:
                flags[entry.piece - first] = entry.state is not BorrowState.MOVING
        moving = [piece for piece in list(self._transfers.queue.entries) if first <= piece < end]
        flags[[piece - first for piece in moving]] = False
        return flags

    def borrowed(self, expert: int) -> bool:
        return expert in self._placement.buffer.borrowed

    def in_flight(self, expert: int) -> TransferStatus | None:
        entry = self._transfers.entries.get(expert)
        if entry is None:
            return None
        return TransferStatus(entry.started == entry.chunks and not entry.dropped)

    def in_host(self, expert: int) -> bool:
        return self._transfers.host is not None and self._transfers.host.has(expert)

    def room(self, expert: int) -> int:
        cache, buffer = self._placement.cache, self._placement.buffer
        return cache.unpinned_slots(int(cache.state.group_of[expert])) - len(buffer.borrowed)

    def promotions(self) -> int:
        if self._placement.cache.policy.preload is not None:
            return 0
        return self._placement.buffer.size

    def backlog(self, step_pieces: Sequence[int]) -> Sequence[tuple[int, int, int]]:
        return list(self._transfers.queue.backlog(step_pieces))
