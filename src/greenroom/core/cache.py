"""The cache: which piece has which slot. Compiled, and bound to one policy."""

from __future__ import annotations

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
from greenroom.core.stream import Stream
from greenroom.errors import BudgetError, UnknownName

SCOPES = ("shared", "per-layer")
PINS = ("step", "none")


def split_capacity(capacity: int, layers: int, scope: str) -> list[int]:
    """Slots of each group: one group for all layers, or one a layer ("-Dist").

    `per-layer` gives capacity // layers each, and one more to the first capacity % layers.
    """
    if scope not in SCOPES:
        raise UnknownName("scope", scope, SCOPES)
    if capacity < 1:
        raise BudgetError(f"a cache needs at least one slot: {capacity}")
    if scope == "shared":
        return [capacity]
    if capacity < layers:
        raise BudgetError(f"scope per-layer needs a slot for each of {layers} layers: {capacity}")
    return [capacity // layers + (i < capacity % layers) for i in range(layers)]


def check_pin(pin: str) -> None:
    """UnknownName unless it says how a step's pieces are protected."""
    if pin not in PINS:
        raise UnknownName("pin", pin, PINS)


def empty_state(layer: Ints, sizes: Sequence[int]) -> State:
    """A cache of groups of these sizes with nothing in it; `layer` [P] is each piece's."""
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    total = int(first[-1])
    # Stacks: the lowest slot of a group is on top.
    free = [slot for a, b in pairwise(first.tolist()) for slot in range(b - 1, a - 1, -1)]
    return State(
        slot_of=np.full(layer.size, -1, np.int64),
        piece_in=np.full(total, -1, np.int64),
        pinned=np.zeros(layer.size, np.int64),
        group_of=np.zeros(layer.size, np.int64) if len(sizes) == 1 else layer.astype(np.int64),
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
    return Bound(miss, serve, evict, evict_victim, borrow)


def compile_for(policy: Policy) -> None:
    """Compile a policy's step now, and a loan; the first request would otherwise wait for it."""
    cache, piece = Cache(Pieces.whole([0, 1], [1]), 1, policy), np.zeros(1, np.int64)
    cache.serve(piece, 0)
    cache.release(piece)
    cache.borrow(0)


class Cache:
    """Slots for pieces, in groups of a fixed capacity, under one policy.

    A miss always inserts (demand paging, no bypass; only a policy with a `preload` differs). The
    pieces of a step are pinned while it is served, unless their group has fewer slots than the
    step asks of it. `trace` is for policies that must know the whole of it.
    """

    def __init__(
        self,
        pieces: Pieces,
        capacity: int,
        policy: Policy,
        scope: str = "shared",
        seed: int = 0,
        trace: Stream | None = None,
    ) -> None:
        self.pieces, self.policy, self.scope = pieces, policy, scope
        self._bound = bind(policy)
        sizes = split_capacity(capacity, pieces.layers, scope)
        self.state = empty_state(pieces.layer, sizes)
        setup = policy.setup(
            pieces.layer, self.state.group_of, tuple(sizes), pieces.layers, seed, trace
        )
        self.own = policy.memory(setup)
        if policy.preload is not None:
            preload(self.state, policy.preload(setup))
        self.now = Now(0, 0, -1, 0, 0)  # of the step served last

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
    ) -> Served:
        """Request distinct pieces of one layer, in this order, at logical time `now`.

        `token` is the pass (now // layers where it is not given), `request` the prompt; `rows` and
        `weights` are as in `Stream`. With pin="step" the pieces stay pinned until `release`; a step
        larger than its group is not.
        """
        check_pin(pin)
        piece = int(pieces[0]) if pieces.size else 0
        group = self.state.group_of[piece]
        room = self.state.first[group + 1] - self.state.first[group]
        pinned = pin == "step" and (fill >= 0 or pieces.size <= room)
        at = Now(
            now,
            now // self.pieces.layers if token is None else token,
            request,
            int(self.pieces.layer[piece]),
            self.now.index,
        )
        out = np.empty((3, pieces.size), np.int64)
        served = self._bound.serve(
            self.state,
            self.own,
            pieces,
            NO_ROWS if rows is None else rows,
            NO_WEIGHTS if weights is None else weights,
            at,
            request != self.now.request,
            pinned,
            fill,
            out,
        )
        self.now = at._replace(index=at.index + pieces.size)
        if not served:
            raise RuntimeError("no piece can be evicted: every resident is pinned")
        return Served(out[0], out[1], out[2], pinned)

    def release(self, pieces: Ints) -> None:
        """Undo the pins of a step that is over."""
        self.state.pinned[pieces] -= 1

    def remove(self, piece: int, now: int) -> None:
        """Forget a piece whose bytes did not arrive."""
        if self.state.slot_of[piece] >= 0:
            self._bound.evict(self.state, self.own, piece, self.now)

    def borrow(self, piece: int) -> tuple[int, int]:
        """Take a slot that this piece may have out of the cache, by evicting where none is free.

        (slot, evicted piece or -1), the slot -1 where all are pinned. The policy learns of no
        insertion. It is to come back by `give_back`.
        """
        slot, evicted = self._bound.borrow(self.state, self.own, piece, self.now)
        return int(slot), int(evicted)

    def give_back(self, slot: int) -> None:
        """A slot that was borrowed is free again."""
        state = self.state
        group = int(np.searchsorted(state.first, slot, side="right")) - 1
        state.free[state.first[group] + state.free_count[group]] = slot
        state.free_count[group] += 1

    def room(self, layer: int) -> int:
        """Slots that a layer's pieces may have: those of its group."""
        group = self.state.group_of[self.pieces.offsets[layer]]
        return int(self.state.first[group + 1] - self.state.first[group])

    def residents(self) -> Ints:
        """Pieces that have a slot, ascending."""
        return np.sort(self.state.piece_in[self.state.piece_in >= 0])

    def resize(self, capacity: int) -> None:
        """Change the number of slots; victims go by the policy, others may change their slot."""
        state, sizes = self.state, split_capacity(capacity, self.pieces.layers, self.scope)
        for group, size in enumerate(sizes):
            held = [p for p in self.residents() if state.group_of[p] == group]
            for _ in range(len(held) - size):
                if self._bound.evict_victim(state, self.own, group, self.now) < 0:
                    raise RuntimeError("a pinned piece cannot be evicted")
        residents = self.residents()
        self.state = empty_state(self.pieces.layer, sizes)._replace(pinned=state.pinned)
        preload(self.state, residents)
