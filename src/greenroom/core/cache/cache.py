"""The expert cache: slots for experts or their top segments, under one eviction policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from greenroom.core.cache import serving
from greenroom.core.cache.bound import bind_steadily
from greenroom.core.cache.scope import Scope
from greenroom.core.cache.state import empty_state, group_sizes, preload, slot_groups
from greenroom.core.pieces import Ints, Pieces
from greenroom.core.policy import (
    NO_ROWS,
    NO_WEIGHTS,
    CacheState,
    LogicalTime,
    Policy,
    Rows,
    Weights,
)
from greenroom.core.stream import Stream
from greenroom.errors import BudgetError, UnknownName, UsageError

PINS = ("step", "none")
Flags = serving.Flags
Clock = tuple[int, int, int, int, int]  # the first fields of a `LogicalTime`
NO_FLAGS, NO_PIECES = np.empty(0, np.bool_), np.empty(0, np.int64)
MOST_HITS = 64  # steps of hits that are reported to a policy at a time


def check_pin(pin: str) -> None:
    """Check a pinning mode: "step" or "none"; UnknownName for any other name."""
    if pin not in PINS:
        raise UnknownName("pin", pin, PINS)


@dataclass(slots=True)
class ServedStep:
    """The slots, hits and evictions after the cache has served a step's requests.

    Arrays are in the order of the requests, one for each unsplit expert or top segment (piece).

    slots:   the cache slot of each requested piece; -1 if the cache gave it none
    hits:    1 where the piece was resident; 0 for a prefetch in a borrowed slot (unlike `Counts`)
    evicted: the piece that was evicted for the request, or -1
    pinned:  the step's pieces stay pinned until `release`
    misses:  how many pieces were not resident"""

    slots: Ints
    hits: Ints
    evicted: Ints
    pinned: bool
    misses: int


class Cache:
    """The expert cache: slots in slot groups of a fixed size, under one eviction policy.

    A piece is an unsplit expert or the top segment of a split one. A slot group is a set of slots
    under one budget: those of all layers, or of one layer; each of several devices has its own
    groups, and its own instance of the policy. `sizes` are the numbers of slots of the groups.
    Every miss is inserted, unless the policy has a `preload`, or `fill` or `without_slot` of
    `serve` forbid it. `trace` is for policies that must know the whole trace."""

    def __init__(
        self,
        pieces: Pieces,
        capacity: int,
        policy: Policy,
        scope: Scope = "shared",
        seed: int = 0,
        trace: Stream | None = None,
    ) -> None:
        self.pieces, self.policy, self.scope = pieces, policy, scope
        self._layers = pieces.layers
        self._bound = bind_steadily(policy)
        if pieces.devices > 1 and policy.needs_trace:
            raise UsageError(
                f"policy {policy.name} must know the whole trace, which works on one device only,"
                f" got {pieces.devices} devices: choose another policy"
            )
        sizes = group_sizes(pieces, capacity, scope)
        self.state = self._empty(sizes)
        self._device_states = self._divided()
        each, self._policy_states = len(sizes) // pieces.devices, []
        for device, part in enumerate(self._device_states):
            own_sizes = tuple(sizes[device * each : (device + 1) * each])
            if not any(own_sizes):  # a spare device: as many as the first has
                own_sizes = tuple(sizes[:each])
            setup = policy.setup(pieces.layer, part.group_of, own_sizes, pieces.layers, seed, trace)
            self._policy_states.append(policy.build_state(setup))
            if policy.preload is not None:
                preload(self.state, policy.preload(setup))
        self.pinned_set = np.empty(0, np.int64)  # pieces that the policy must never evict
        self.now: Clock = 0, 0, -1, 0, 0  # of the last step
        # Of each policy: the last request, and the requests counted so far.
        self._last_seen = [(-1, 0)] * pieces.devices
        # Steps not yet reported to each device's policy: pieces, and a row of `serving.serve`.
        self._unreported: list[list[tuple[Ints, tuple[int, ...]]]] = [[] for _ in self._last_seen]
        self._most_hits = 1 if policy.weighs else MOST_HITS  # rows and weights are not stored
        # Of the last step of hits: pinned before a policy chooses a victim.
        self._unpinned = NO_PIECES
        self._all_hit = np.ones(pieces.layer.size, np.int64), np.full(pieces.layer.size, -1)

    def _empty(self, sizes: list[int]) -> CacheState:
        self.sizes = sizes
        return empty_state(self.pieces.layer, sizes, slot_groups(self.pieces, sizes))

    def _divided(self) -> list[CacheState]:
        """Divide the cache's state by device, as each device's eviction policy sees it."""
        devices, state, layer = self.pieces.devices, self.state, self.pieces.layer
        if devices == 1:
            return [state]
        each = state.free_count.size // devices
        group_of = layer.astype(np.int64) if each > 1 else np.zeros(layer.size, np.int64)
        return [
            state._replace(
                group_of=group_of,
                first=state.first[d * each : (d + 1) * each + 1],
                free_count=state.free_count[d * each : (d + 1) * each],
            )
            for d in range(devices)
        ]

    @property
    def capacity(self) -> int:
        return self.state.piece_in.size

    def serve(
        self,
        pieces: Ints,
        now: int,
        pin: str = "step",
        *,
        token: int | None = None,
        request: int = 0,
        prefill: bool = False,
        rows: Rows | None = None,
        weights: Weights | None = None,
        fill: int = -1,
        without_slot: Flags = NO_FLAGS,
    ) -> ServedStep:
        """Request distinct experts (or top segments) of one layer from the cache, in order.

        now:           the logical time: (pass or token) * layers + layer
        token:         the number of the pass or token; now // layers by default
        request:       the index of the request (a prompt with its answer)
        prefill:       whether the pass reads (a block of) a prompt
        rows, weights: how many tokens chose each expert, and sums of gate weights, [n] or None
        pin:           with "step" the experts stay pinned until `release`, unless the step is
                       larger than its slot group
        fill:          how many misses may be inserted, into free slots only; -1: no limit
        without_slot:  flags of misses that get no slot, [n] or empty"""
        if pin != "step":
            check_pin(pin)
        piece = int(pieces[0]) if pieces.size else 0
        pinned = pin == "step" and (fill >= 0 or self.fits(pieces))
        token = now // self._layers if token is None else token
        self.now = at = now, token, request, int(self.pieces.layer[piece]), int(prefill)
        rows = NO_ROWS if rows is None else rows
        weights = NO_WEIGHTS if weights is None else weights
        if self.pieces.devices == 1:
            return self._serve(0, pieces, rows, weights, at, pinned, fill, without_slot)
        out, misses = np.empty((3, pieces.size), np.int64), 0
        devices = sorted({*(home := self.pieces.home_device[pieces]).tolist()})
        for number, device in enumerate(devices):
            mine = np.flatnonzero(home == device)
            part = self._serve(
                device,
                pieces[mine],
                rows[mine] if rows.size else rows,
                weights[mine] if weights.size else weights,
                at,
                pinned,
                fill if fill < 0 else (fill + len(devices) - 1 - number) // len(devices),
                without_slot[mine] if without_slot.size else without_slot,
            )
            out[:, mine] = part.slots, part.hits, part.evicted
            misses += part.misses
        return ServedStep(out[0], out[1], out[2], pinned, misses)

    def _serve(
        self,
        device: int,
        pieces: Ints,
        rows: Rows,
        weights: Weights,
        at: Clock,
        pinned: bool,
        fill: int,
        without_slot: Flags,
    ) -> ServedStep:
        """Serve a step's pieces of one device; a step of hits is reported to the policy later."""
        request, index = self._last_seen[device]
        log, size = self._unreported[device], pieces.size
        log.append((pieces, (*at, index, at[2] != request, size)))
        self._last_seen[device] = at[2], index + size
        slots = self.state.slot_of[pieces]
        if -1 not in slots.tolist() and len(log) < self._most_hits:
            if pinned:
                if self._unpinned.size:
                    self.pin_hits()
                self._unpinned = pieces
            every, none = self._all_hit
            return ServedStep(slots, every[:size], none[:size], pinned, 0)
        out = np.empty((3, size), np.int64)
        misses = self._report(device, rows, weights, pinned, fill, without_slot, out)
        return ServedStep(out[0], out[1], out[2], pinned, misses)

    def _report(
        self,
        device: int,
        rows: Rows,
        weights: Weights,
        pinned: bool,
        fill: int,
        without_slot: Flags,
        out: Ints,
    ) -> int:
        """Report steps to a device's policy; the last of them may miss.

        Fills `out` [3, n] with slots, hits and evicted pieces; returns the number of misses."""
        log = self._unreported[device]
        pieces, steps = zip(*log, strict=True)
        log.clear()
        if self._unpinned.size:
            self.pin_hits()
        serve = self._bound.serve
        misses: int = (serve.function if rows.size or weights.size else serve)(
            self._device_states[device], self._policy_states[device],
            np.concatenate(pieces, dtype=np.int64), rows, weights,
            np.array(steps), pinned, fill, without_slot, out,
        )  # fmt: skip
        if misses < 0:
            raise RuntimeError(f"no expert of device {device} can be evicted: all are pinned")
        return misses

    def pin_hits(self) -> None:
        """Pin the experts of the latest step with hits only, unless it is over."""
        self.state.pinned[self._unpinned] += 1
        self._unpinned = NO_PIECES

    def report_hits(self) -> None:
        """Report all steps to every policy, before it decides or its state is read."""
        self.pin_hits()
        for device, log in enumerate(self._unreported):
            if log:
                out = np.empty((3, log[-1][0].size), np.int64)
                self._report(device, NO_ROWS, NO_WEIGHTS, False, -1, NO_FLAGS, out)

    @property
    def policy_states(self) -> list[Any]:
        """The states of the eviction policy, one for each device."""
        self.report_hits()
        return self._policy_states

    def _at(self, piece: int) -> tuple[CacheState, Any, LogicalTime]:
        """Arguments for a policy's decision about a piece, between steps."""
        device = int(self.pieces.home_device[piece])
        self.report_hits()
        return (
            self._device_states[device],
            self._policy_states[device],
            LogicalTime(*self.now, self._last_seen[device][1]),
        )

    def pin(self, pieces: Ints) -> None:
        """Replace the set of experts that are never evicted once they are resident.

        BudgetError if the new set would take all slots of a slot group."""
        self.check_pinned(self.sizes, pieces)
        self.state.pinned[self.pinned_set] -= 1
        self.pinned_set = np.sort(pieces)
        self.state.pinned[self.pinned_set] += 1

    def sizes_for(self, capacity: int, pinned_set: Ints | None = None) -> list[int]:
        """Return the number of slots of each slot group for a given cache capacity.

        BudgetError if the pinned experts would take all slots of a slot group."""
        sizes = group_sizes(self.pieces, capacity, self.scope)
        self.check_pinned(sizes, self.pinned_set if pinned_set is None else pinned_set)
        return sizes

    def check_pinned(
        self, sizes: Sequence[int], pinned_set: Ints, group_of: Ints | None = None
    ) -> None:
        group_of = self.state.group_of if group_of is None else group_of
        of_groups = np.bincount(group_of[pinned_set], minlength=len(sizes))
        for size, count in zip(sizes, of_groups.tolist(), strict=True):
            if count and count >= size:
                raise BudgetError(
                    f"{count} pinned experts leave none of {size} cache slots for the others:"
                    f" pin fewer experts (--pin), or give the cache memory for more than {count}"
                )

    def fits(self, pieces: Ints) -> bool:
        """Tell whether a layer's requested experts can all have cache slots at once."""
        if self.pieces.devices == 1 and not self.pinned_set.size and pieces.size:
            return bool(pieces.size <= self.sizes[self.state.group_of[pieces[0]]])
        return all(
            size <= self.unpinned_slots(slot_group)
            for slot_group, size in self.slots_needed(pieces).items()
        )

    def unpinned_slots(self, slot_group: int) -> int:
        """Return how many slots of a slot group unpinned experts may use."""
        if not self.pinned_set.size:
            return self.sizes[slot_group]
        return self.sizes[slot_group] - int(
            (self.state.group_of[self.pinned_set] == slot_group).sum()
        )

    def slots_needed(self, pieces: Ints) -> dict[int, int]:
        """Count the slots that unpinned experts of a layer's step need in each slot group."""
        if self.pinned_set.size:
            pieces = pieces[~np.isin(pieces, self.pinned_set)]
        if not pieces.size:
            return {}
        if self.pieces.devices == 1:  # a step is of one layer
            return {int(self.state.group_of[pieces[0]]): int(pieces.size)}
        return Counter(self.state.group_of[pieces].tolist())

    def release(self, pieces: Ints) -> None:
        """Unpin experts after a layer's step, so that they can be evicted again."""
        if pieces is self._unpinned:
            self._unpinned = NO_PIECES
            return
        if self._unpinned.size:
            self.pin_hits()
        self.state.pinned[pieces] -= 1

    def remove(self, piece: int, now: int) -> None:
        """Remove an expert (or segment) from the cache because its bytes did not arrive."""
        if self.state.slot_of[piece] >= 0:
            state, policy_state, at = self._at(piece)
            self._bound.evict(state, policy_state, piece, at)

    def borrow(self, piece: int) -> tuple[int, int]:
        """Borrow a cache slot for a prefetched expert: a free slot, or one by eviction.

        Returns (slot, id of what was evicted or -1); the slot is -1 if every resident is pinned. No
        insertion is reported to the policy. `return_slot` frees the slot again."""
        state, policy_state, at = self._at(piece)
        slot, evicted = self._bound.borrow(state, policy_state, piece, at)
        return int(slot), int(evicted)

    def admit(self, piece: int, slot: int) -> None:
        """Make a prefetched expert in a borrowed slot resident, and report it to the policy."""
        self.return_slot(slot)
        state, policy_state, at = self._at(piece)
        self._bound.admit(state, policy_state, piece, at)

    def return_slot(self, slot: int) -> None:
        """Free a cache slot that a prefetch has borrowed."""
        state = self.state
        slot_group = int(np.searchsorted(state.first, slot, side="right")) - 1
        state.free[state.first[slot_group] + state.free_count[slot_group]] = slot
        state.free_count[slot_group] += 1

    def room(self, layer: int) -> int:
        """Count the cache slots that a layer's experts may use: all of the layer's slot groups."""
        begin, end = self.pieces.offsets[layer : layer + 2]
        if self.pieces.devices == 1:
            end = begin + 1
        return sum(map(self.sizes.__getitem__, {*self.state.group_of[begin:end].tolist()}))

    def residents(self) -> Ints:
        """Return the ids of the experts (or top segments) that have a cache slot, ascending."""
        return np.sort(self.state.piece_in[self.state.piece_in >= 0])

    def resize(self, capacity: int) -> None:
        """Change the cache's number of slots; the policy chooses victims, other experts may move.

        BudgetError if the new capacity is too small for the slot groups or the pinned set."""
        state, sizes = self.state, self.sizes_for(capacity)
        self.report_hits()
        each = len(sizes) // self.pieces.devices
        for slot_group, size in enumerate(sizes):
            members = [p for p in self.residents() if state.group_of[p] == slot_group]
            for _ in range(len(members) - size):
                part, policy_state, at = self._at(members[0])
                if self._bound.evict_victim(part, policy_state, slot_group % each, at) < 0:
                    raise RuntimeError(f"cannot shrink to {capacity} slots: all experts are pinned")
        residents = self.residents()
        self.state = self._empty(sizes)._replace(pinned=state.pinned)
        self._device_states = self._divided()
        preload(self.state, residents)


def compile_for(policy: Policy) -> None:
    """Compile the cache's functions for an eviction policy before the first pass needs them."""
    cache, piece = Cache(Pieces.unsplit([0, 1], [1]), 1, policy), np.zeros(1, np.int64)
    cache.serve(piece, 0)
    cache.release(piece)
    cache.borrow(0)
