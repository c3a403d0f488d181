"""The cache: which piece has which slot. Compiled, and bound to one policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from greenroom.core.cache import serving
from greenroom.core.cache.bound import bind
from greenroom.core.cache.scope import Scope
from greenroom.core.cache.state import empty_state, group_sizes, preload
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
Clock = tuple[int, int, int, int]  # the first fields of a `Now`
NOBODY, NO_PIECES = np.empty(0, np.bool_), np.empty(0, np.int64)
MOST_HITS = 64  # steps of hits that a policy is told of at a time


def check_pin(pin: str) -> None:
    """UnknownName unless it says how a step's pieces are protected."""
    if pin not in PINS:
        raise UnknownName("pin", pin, PINS)


@dataclass(slots=True)
class Served:
    """What became of a step's requests, in their order.

    `slots[i]` is where request i is or will be (-1: it passes through a scratch slot), `hits[i]` is
    1 where it already was, `evicted[i]` is the piece that made room, or -1. `pinned` says that the
    step's pieces await a `release`; `misses` of them were not there.
    """

    slots: Ints
    hits: Ints
    evicted: Ints
    pinned: bool
    misses: int


class Cache:
    """Slots for pieces, in groups of a fixed capacity, under one policy.

    A piece has a slot of its home's alone. Each of several devices has a policy of its own, which
    knows the pieces that live there; their slots lie in the same arrays, one after another.

    A miss always inserts (demand paging, no bypass; only a policy with a `preload` differs). The
    pieces of a step are pinned while it is served, unless their group has fewer slots than the
    step asks of it. `sizes` are the slots of each group. `trace` is for policies that must know
    the whole of it.
    """

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
        self._bound = bind(policy)
        if pieces.devices > 1 and policy.needs_trace:
            raise UsageError(f"policy {policy.name} decides beforehand, for one device alone")
        sizes = group_sizes(pieces, capacity, scope)
        self.state = self._empty(sizes)
        self._parts = self._divided()
        each, self._own = len(sizes) // pieces.devices, []
        for device, part in enumerate(self._parts):
            own = tuple(sizes[device * each : (device + 1) * each])
            setup = policy.setup(pieces.layer, part.group_of, own, pieces.layers, seed, trace)
            self._own.append(policy.build_state(setup))
            if policy.preload is not None:
                preload(self.state, policy.preload(setup))
        self.pinned_set = np.empty(0, np.int64)  # pieces that the policy must not evict
        self.now: Clock = 0, 0, -1, 0  # of the step served last
        self._told = [(-1, 0)] * pieces.devices  # each policy's last request, and its own pieces
        # Steps that each device's policy does not know of yet: their pieces, and the rows of
        # `steps` for `serving.serve`.
        self._log: list[list[tuple[Ints, tuple[int, ...]]]] = [[] for _ in self._parts]
        self._most_hits = 1 if policy.weighs else MOST_HITS  # told at once of rows and weights
        self._open = NO_PIECES  # of a step of hits: pinned before a policy is asked for a victim
        self._all_hit = np.ones(pieces.layer.size, np.int64), np.full(pieces.layer.size, -1)

    def _empty(self, sizes: list[int]) -> CacheState:
        pieces, each = self.pieces, len(sizes) // self.pieces.devices
        self.sizes = sizes
        if pieces.devices == 1:
            return empty_state(pieces.layer, sizes)
        return empty_state(
            pieces.layer, sizes, pieces.home_device * each + (pieces.layer if each > 1 else 0)
        )

    def _divided(self) -> list[CacheState]:
        """The state as each device's policy sees it: its own groups, in the same arrays."""
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
        rows: Rows | None = None,
        weights: Weights | None = None,
        fill: int = -1,
        aside: Flags = NOBODY,
    ) -> Served:
        """Request distinct pieces of one layer, in this order, at logical time `now`.

        `token` is the pass (now // layers where it is not given), `request` the prompt; `rows` and
        `weights` are as in `Stream`. With pin="step" the pieces stay pinned until `release`; a step
        larger than its group is not. Misses that are `aside` get no slot.
        """
        if pin != "step":
            check_pin(pin)
        piece = int(pieces[0]) if pieces.size else 0
        pinned = pin == "step" and (fill >= 0 or self.fits(pieces))
        token = now // self._layers if token is None else token
        self.now = at = now, token, request, int(self.pieces.layer[piece])
        rows = NO_ROWS if rows is None else rows
        weights = NO_WEIGHTS if weights is None else weights
        if self.pieces.devices == 1:
            return self._serve(0, pieces, rows, weights, at, pinned, fill, aside)
        out, misses = np.empty((3, pieces.size), np.int64), 0
        home, devices = self.pieces.home_device[pieces], self.pieces.devices
        for device in {*home.tolist()}:
            mine = np.flatnonzero(home == device)
            part = self._serve(
                device,
                pieces[mine],
                rows[mine] if rows.size else rows,
                weights[mine] if weights.size else weights,
                at,
                pinned,
                fill if fill < 0 else fill // devices + (device < fill % devices),
                aside[mine] if aside.size else aside,
            )
            out[:, mine] = part.slots, part.hits, part.evicted
            misses += part.misses
        return Served(out[0], out[1], out[2], pinned, misses)

    def _serve(
        self,
        device: int,
        pieces: Ints,
        rows: Rows,
        weights: Weights,
        at: Clock,
        pinned: bool,
        fill: int,
        aside: Flags,
    ) -> Served:
        """A step's pieces of one device. Where all hit the policy has nothing to decide: it is told
        of the step before it is asked next."""
        request, index = self._told[device]
        log, size = self._log[device], pieces.size
        log.append((pieces, (*at, index, at[2] != request, size)))
        self._told[device] = at[2], index + size
        slots = self.state.slot_of[pieces]
        if -1 not in slots.tolist() and len(log) < self._most_hits:
            if pinned:
                if self._open.size:
                    self.pin_hits()
                self._open = pieces
            every, none = self._all_hit
            return Served(slots, every[:size], none[:size], pinned, 0)
        out = np.empty((3, size), np.int64)
        misses = self._tell(device, rows, weights, pinned, fill, aside, out)
        return Served(out[0], out[1], out[2], pinned, misses)

    def _tell(
        self,
        device: int,
        rows: Rows,
        weights: Weights,
        pinned: bool,
        fill: int,
        aside: Flags,
        out: Ints,
    ) -> int:
        """Tell a device's policy of the steps that it does not know yet, the last of which may
        miss: fills `out` [3, n] as `Served` has it. How many missed."""
        log = self._log[device]
        pieces, steps = zip(*log, strict=True)
        log.clear()
        if self._open.size:
            self.pin_hits()
        misses: int = self._bound.serve(
            self._parts[device], self._own[device],
            np.concatenate(pieces) if len(pieces) > 1 else pieces[0], rows, weights,
            np.array(steps), pinned, fill, aside, out,
        )  # fmt: skip
        if misses < 0:
            raise RuntimeError("no piece can be evicted: every resident is pinned")
        return misses

    def pin_hits(self) -> None:
        """Pin the pieces of the step of hits that was served last, unless it is over."""
        self.state.pinned[self._open] += 1
        self._open = NO_PIECES

    def _tell_hits(self) -> None:
        """Tell every policy of all steps: it is to be asked, or its memory looked at."""
        self.pin_hits()
        for device, log in enumerate(self._log):
            if log:
                out = np.empty((3, log[-1][0].size), np.int64)
                self._tell(device, NO_ROWS, NO_WEIGHTS, False, -1, NOBODY, out)

    @property
    def own(self) -> list[Any]:
        """What each device's policy remembers."""
        self._tell_hits()
        return self._own

    def _at(self, piece: int) -> tuple[CacheState, Any, LogicalTime]:
        """What a policy is asked with about a piece, between steps."""
        device = int(self.pieces.home_device[piece])
        self._tell_hits()
        return self._parts[device], self._own[device], LogicalTime(*self.now, self._told[device][1])

    def pin(self, pieces: Ints) -> None:
        """Let these pieces, and no longer those of before, stay once they are there.

        BudgetError where they would leave a group no slot for others.
        """
        self._check_pinned(self.sizes, pieces)
        self.state.pinned[self.pinned_set] -= 1
        self.pinned_set = np.sort(pieces)
        self.state.pinned[self.pinned_set] += 1

    def sizes_for(self, capacity: int, pinned_set: Ints | None = None) -> list[int]:
        """Slots of each group where there are so many in all.

        BudgetError where a group would have no slot beside what is kept (or shall be).
        """
        sizes = group_sizes(self.pieces, capacity, self.scope)
        self._check_pinned(sizes, self.pinned_set if pinned_set is None else pinned_set)
        return sizes

    def _check_pinned(self, sizes: Sequence[int], pinned_set: Ints) -> None:
        of_groups = np.bincount(self.state.group_of[pinned_set], minlength=len(sizes))
        for size, count in zip(sizes, of_groups.tolist(), strict=True):
            if count >= size:
                raise BudgetError(
                    f"{count} pinned experts leave none of {size} slots for the others: pin fewer,"
                    f" or have more than {count} slots"
                )

    def fits(self, pieces: Ints) -> bool:
        """Whether a step's pieces can all have slots at the same time."""
        if self.pieces.devices == 1 and not self.pinned_set.size and pieces.size:
            return bool(pieces.size <= self.sizes[self.state.group_of[pieces[0]]])
        return all(size <= self.open(group) for group, size in self.asked(pieces).items())

    def open(self, group: int) -> int:
        """Slots of a group that are nobody's for good."""
        if not self.pinned_set.size:
            return self.sizes[group]
        return self.sizes[group] - int((self.state.group_of[self.pinned_set] == group).sum())

    def asked(self, pieces: Ints) -> dict[int, int]:
        """How many slots a step's pieces ask of each group; those of kept ones are theirs."""
        if self.pinned_set.size:
            pieces = pieces[~np.isin(pieces, self.pinned_set)]
        if not pieces.size:
            return {}
        if self.pieces.devices == 1:  # a step is of one layer
            return {int(self.state.group_of[pieces[0]]): int(pieces.size)}
        return Counter(self.state.group_of[pieces].tolist())

    def release(self, pieces: Ints) -> None:
        """Undo the pins of a step that is over, or of some of its pieces."""
        if pieces is self._open:
            self._open = NO_PIECES
            return
        if self._open.size:
            self.pin_hits()
        self.state.pinned[pieces] -= 1

    def remove(self, piece: int, now: int) -> None:
        """Forget a piece whose bytes did not arrive."""
        if self.state.slot_of[piece] >= 0:
            state, own, at = self._at(piece)
            self._bound.evict(state, own, piece, at)

    def borrow(self, piece: int) -> tuple[int, int]:
        """Take a slot that this piece may have out of the cache, by evicting where none is free.

        (slot, evicted piece or -1), the slot -1 where all are pinned. The policy learns of no
        insertion. It is to come back by `return_slot`.
        """
        state, own, at = self._at(piece)
        slot, evicted = self._bound.borrow(state, own, piece, at)
        return int(slot), int(evicted)

    def admit(self, piece: int, slot: int) -> None:
        """A piece has come into a slot that was borrowed for it, and is a resident from now on: the
        policy hears of an insertion."""
        self.return_slot(slot)
        state, own, at = self._at(piece)
        self._bound.admit(state, own, piece, at)

    def return_slot(self, slot: int) -> None:
        """A slot that was borrowed is free again."""
        state = self.state
        group = int(np.searchsorted(state.first, slot, side="right")) - 1
        state.free[state.first[group] + state.free_count[group]] = slot
        state.free_count[group] += 1

    def room(self, layer: int) -> int:
        """Slots that a layer's pieces may have: those of its groups."""
        begin, end = self.pieces.offsets[layer : layer + 2]
        if self.pieces.devices == 1:
            end = begin + 1
        return sum(map(self.sizes.__getitem__, {*self.state.group_of[begin:end].tolist()}))

    def residents(self) -> Ints:
        """Pieces that have a slot, ascending."""
        return np.sort(self.state.piece_in[self.state.piece_in >= 0])

    def resize(self, capacity: int) -> None:
        """Change the number of slots; victims go by the policy, others may change their slot."""
        state, sizes = self.state, self.sizes_for(capacity)
        self._tell_hits()
        each = len(sizes) // self.pieces.devices
        for group, size in enumerate(sizes):
            held = [p for p in self.residents() if state.group_of[p] == group]
            for _ in range(len(held) - size):
                part, own, at = self._at(held[0])
                if self._bound.evict_victim(part, own, group % each, at) < 0:
                    raise RuntimeError("a pinned piece cannot be evicted")
        residents = self.residents()
        self.state = self._empty(sizes)._replace(pinned=state.pinned)
        self._parts = self._divided()
        preload(self.state, residents)


def compile_for(policy: Policy) -> None:
    """Compile a policy's step now, and a loan; the first request would otherwise wait for it."""
    cache, piece = Cache(Pieces.unsplit([0, 1], [1]), 1, policy), np.zeros(1, np.int64)
    cache.serve(piece, 0)
    cache.release(piece)
    cache.borrow(0)
