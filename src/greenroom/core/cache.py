"""The cache: which piece has which slot. Compiled, and bound to one policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from greenroom.core import serving
from greenroom.core.kept import bound, kept
from greenroom.core.pieces import Ints, Pieces
from greenroom.core.policy import (
    INLINED,
    NO_ROWS,
    NO_WEIGHTS,
    Now,
    Policy,
    Rows,
    State,
    Weights,
)
from greenroom.core.scope import Scope, exact_slots, split_capacity, top_slots
from greenroom.core.stream import Stream
from greenroom.errors import BudgetError, UnknownName, UsageError

PINS = ("step", "none")
Flags = serving.Flags
NOBODY = np.empty(0, np.bool_)


def check_pin(pin: str) -> None:
    """UnknownName unless it says how a step's pieces are protected."""
    if pin not in PINS:
        raise UnknownName("pin", pin, PINS)


def group_sizes(pieces: Pieces, capacity: int, scope: Scope) -> list[int]:
    """Slots of each group: a device has groups of its own, and theirs follow one another.

    Where experts are split, `capacity` is in whole experts' slots, and what they take beside the
    bottoms' own becomes slots of tops; so it is with low-precision copies.
    """
    if pieces.split is not None:
        return top_slots(pieces, pieces.split, capacity, scope)
    if pieces.copies is not None:
        capacity = exact_slots(pieces.copies, capacity)
    sizes: list[int] = []
    for device, share in enumerate(pieces.shares(capacity)):
        at_home = np.bincount(pieces.layer[pieces.home == device], minlength=pieces.layers)
        sizes += split_capacity(share, pieces.layers, scope, at_home.tolist())
    return sizes


def empty_state(layer: Ints, sizes: Sequence[int], group_of: Ints | None = None) -> State:
    """A cache of groups of these sizes with nothing in it; `layer` [P] is each piece's.

    Without `group_of` [P] there is one group for all layers, or one a layer.
    """
    if group_of is None:
        group_of = np.zeros(layer.size, np.int64) if len(sizes) == 1 else layer.astype(np.int64)
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    total = int(first[-1])
    # Stacks: the lowest slot of a group is on top.
    free = [slot for a, b in pairwise(first.tolist()) for slot in range(b - 1, a - 1, -1)]
    return State(
        slot_of=np.full(layer.size, -1, np.int64),
        piece_in=np.full(total, -1, np.int64),
        pinned=np.zeros(layer.size, np.int64),
        group_of=group_of,
        free=np.array(free, np.int64),
        first=first,
        free_count=np.asarray(sizes, np.int64),
    )


def preload(state: State, pieces: Ints) -> None:
    """Give slots to pieces that are there from the start."""
    for piece in pieces.tolist():
        group = state.group_of[piece]
        state.free_count[group] -= 1
        slot = state.free[state.first[group] + state.free_count[group]]
        state.slot_of[piece], state.piece_in[slot] = slot, piece


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a step's requests, in their order.

    `slots[i]` is where request i is or will be (-1: it passes through a scratch slot), `hits[i]` is
    1 where it already was, `evicted[i]` is the piece that made room, or -1. `pinned` says that the
    step's pieces await a `release`.
    """

    slots: Ints
    hits: Ints
    evicted: Ints
    pinned: bool

    @property
    def misses(self) -> int:
        return int(self.hits.size - self.hits.sum())


class Bound(NamedTuple):
    """A policy's functions in the cache's, each compiled when it is first called."""

    miss: Any  # (state, own, piece, now) -> (slot | BYPASS | STUCK, evicted piece or -1)
    serve: Any  # one step, from Python
    evict: Any
    evict_victim: Any
    borrow: Any
    admit: Any


def bind(policy: Policy) -> Bound:
    """The cache's functions for a policy; compiled once for all its settings."""
    return _bind(
        policy.victim,
        policy.on_hit,
        policy.on_insert,
        policy.on_evict,
        policy.on_step,
        policy.on_request,
        policy.preload is not None,
    )


@cache
def _bind(
    victim: Any,
    on_hit: Any,
    on_insert: Any,
    on_evict: Any,
    on_step: Any,
    on_request: Any,
    bypass: bool,
) -> Bound:
    own = {
        "victim": victim,
        "on_hit": on_hit,
        "on_insert": on_insert,
        "on_evict": on_evict,
        "on_step": on_step,
        "on_request": on_request,
        "bypass": bypass,
    }
    miss = bound(serving.make_miss, own, **INLINED)
    evict = kept(serving.make_evict, own)
    serve = kept(serving.make_serve, own | {"miss": miss})
    evict_victim = kept(serving.make_evict_victim, own | {"evict": evict})
    borrow = kept(serving.make_borrow, own | {"evict": evict})
    admit = kept(serving.make_admit, own | {"miss": miss})
    return Bound(miss, serve, evict, evict_victim, borrow, admit)


def compile_for(policy: Policy) -> None:
    """Compile a policy's step now, and a loan; the first request would otherwise wait for it."""
    cache, piece = Cache(Pieces.whole([0, 1], [1]), 1, policy), np.zeros(1, np.int64)
    cache.serve(piece, 0)
    cache.release(piece)
    cache.borrow(0)


class Cache:
    """Slots for pieces, in groups of a fixed capacity, under one policy.

    A piece has a slot of its home's alone. Each of several devices has a policy of its own, which
    knows the pieces that live there; their slots lie in the same arrays, one after another.

    A miss always inserts (demand paging, no bypass; only a policy with a `preload` differs). The
    pieces of a step are pinned while it is served, unless their group has fewer slots than the
    step asks of it. `trace` is for policies that must know the whole of it.
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
        self._bound = bind(policy)
        if pieces.devices > 1 and policy.needs_trace:
            raise UsageError(f"policy {policy.name} decides beforehand, for one device alone")
        sizes = group_sizes(pieces, capacity, scope)
        self.state = self._empty(sizes)
        self._parts = self._divided()
        each, self.own = len(sizes) // pieces.devices, []
        for device, part in enumerate(self._parts):
            own = tuple(sizes[device * each : (device + 1) * each])
            setup = policy.setup(pieces.layer, part.group_of, own, pieces.layers, seed, trace)
            self.own.append(policy.memory(setup))
            if policy.preload is not None:
                preload(self.state, policy.preload(setup))
        self.kept = np.empty(0, np.int64)  # pieces that the policy must not evict
        self.now = Now(0, 0, -1, 0, 0)  # of the step served last
        self._told = [(-1, 0)] * pieces.devices  # each policy's last request, and its own pieces

    def _empty(self, sizes: list[int]) -> State:
        pieces, each = self.pieces, len(sizes) // self.pieces.devices
        if pieces.devices == 1:
            return empty_state(pieces.layer, sizes)
        return empty_state(
            pieces.layer, sizes, pieces.home * each + (pieces.layer if each > 1 else 0)
        )

    def _divided(self) -> list[State]:
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

    @property
    def groups(self) -> int:
        """Budgets that do not share slots."""
        return self.state.free_count.size

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
        check_pin(pin)
        piece = int(pieces[0]) if pieces.size else 0
        pinned = pin == "step" and (fill >= 0 or self._fits(pieces))
        at = Now(
            now,
            now // self.pieces.layers if token is None else token,
            request,
            int(self.pieces.layer[piece]),
            self.now.index,
        )
        rows = NO_ROWS if rows is None else rows
        weights = NO_WEIGHTS if weights is None else weights
        if self.pieces.devices == 1:
            out = self._serve(0, pieces, rows, weights, at, pinned, fill, aside)
        else:
            out = np.empty((3, pieces.size), np.int64)
            home, devices = self.pieces.home[pieces], self.pieces.devices
            for device in {*home.tolist()}:
                mine = np.flatnonzero(home == device)
                share = fill if fill < 0 else fill // devices + (device < fill % devices)
                out[:, mine] = self._serve(
                    device,
                    pieces[mine],
                    rows[mine] if rows.size else rows,
                    weights[mine] if weights.size else weights,
                    at,
                    pinned,
                    share,
                    aside[mine] if aside.size else aside,
                )
        self.now = at._replace(index=at.index + pieces.size)
        return Served(out[0], out[1], out[2], pinned)

    def _serve(
        self,
        device: int,
        pieces: Ints,
        rows: Rows,
        weights: Weights,
        at: Now,
        pinned: bool,
        fill: int,
        aside: Flags,
    ) -> Ints:
        """A step's pieces of one device: out [3, n], as `Served` has it."""
        request, index = self._told[device]
        at = at._replace(index=index)
        out, begins = np.empty((3, pieces.size), np.int64), at.request != request
        self._told[device] = at.request, index + pieces.size
        part, own = self._parts[device], self.own[device]
        if not self._bound.serve(
            part, own, pieces, rows, weights, at, begins, pinned, fill, aside, out
        ):
            raise RuntimeError("no piece can be evicted: every resident is pinned")
        return out

    def _at(self, piece: int) -> tuple[State, Any, Now]:
        """What a policy is asked with about a piece, between steps."""
        device = int(self.pieces.home[piece])
        now = self.now._replace(index=self._told[device][1])
        return self._parts[device], self.own[device], now

    def keep(self, pieces: Ints) -> None:
        """Let these pieces, and no longer those of before, stay once they are there.

        BudgetError where they would leave a group no slot for others.
        """
        self.check_kept([self.size(group) for group in range(self.groups)], pieces)
        self.state.pinned[self.kept] -= 1
        self.kept = np.sort(pieces)
        self.state.pinned[self.kept] += 1

    def check_kept(self, sizes: Sequence[int], kept: Ints | None = None) -> None:
        """BudgetError where groups of these sizes would have no slot beside what is kept (or shall
        be)."""
        kept = self.kept if kept is None else kept
        of_groups = np.bincount(self.state.group_of[kept], minlength=len(sizes))
        for size, count in zip(sizes, of_groups.tolist(), strict=True):
            if count >= size:
                raise BudgetError(
                    f"{count} pinned experts leave none of {size} slots for the others: pin fewer,"
                    f" or have more than {count} slots"
                )

    def _fits(self, pieces: Ints) -> bool:
        """Whether a step's pieces can all have slots at the same time."""
        return all(size <= self.open(group) for group, size in self.asked(pieces).items())

    def open(self, group: int) -> int:
        """Slots of a group that are nobody's for good."""
        if not self.kept.size:
            return self.size(group)
        return self.size(group) - int((self.state.group_of[self.kept] == group).sum())

    def asked(self, pieces: Ints) -> dict[int, int]:
        """How many slots a step's pieces ask of each group; those of kept ones are theirs."""
        if self.kept.size:
            pieces = pieces[~np.isin(pieces, self.kept)]
        if not pieces.size:
            return {}
        if self.pieces.devices == 1:  # a step is of one layer
            return {int(self.state.group_of[pieces[0]]): int(pieces.size)}
        return Counter(self.state.group_of[pieces].tolist())

    def size(self, group: int) -> int:
        """Slots of a group."""
        return int(self.state.first[group + 1] - self.state.first[group])

    def release(self, pieces: Ints) -> None:
        """Undo the pins of a step that is over."""
        self.state.pinned[pieces] -= 1

    def remove(self, piece: int, now: int) -> None:
        """Forget a piece whose bytes did not arrive."""
        if self.state.slot_of[piece] >= 0:
            state, own, at = self._at(piece)
            self._bound.evict(state, own, piece, at)

    def borrow(self, piece: int) -> tuple[int, int]:
        """Take a slot that this piece may have out of the cache, by evicting where none is free.

        (slot, evicted piece or -1), the slot -1 where all are pinned. The policy learns of no
        insertion. It is to come back by `give_back`.
        """
        state, own, at = self._at(piece)
        slot, evicted = self._bound.borrow(state, own, piece, at)
        return int(slot), int(evicted)

    def admit(self, piece: int, slot: int) -> None:
        """A piece has come into a slot that was borrowed for it, and is a resident from now on: the
        policy hears of an insertion."""
        self.give_back(slot)
        state, own, at = self._at(piece)
        self._bound.admit(state, own, piece, at)

    def give_back(self, slot: int) -> None:
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
        return sum(map(self.size, {*self.state.group_of[begin:end].tolist()}))

    def residents(self) -> Ints:
        """Pieces that have a slot, ascending."""
        return np.sort(self.state.piece_in[self.state.piece_in >= 0])

    def resize(self, capacity: int) -> None:
        """Change the number of slots; victims go by the policy, others may change their slot."""
        state, sizes = self.state, group_sizes(self.pieces, capacity, self.scope)
        self.check_kept(sizes)
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
