"""The cache: which piece has which slot. Compiled, and bound to one policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numba import njit

from greenroom.core.pieces import Ints, Pieces
from greenroom.core.policy import Policy, State
from greenroom.errors import BudgetError, UnknownName

SCOPES = ("shared", "per-layer")


def split_capacity(capacity: int, layers: int, scope: str) -> list[int]:
    """Slots of each group: one group for all layers, or one a layer ("-Dist").

    `per-layer` gives capacity // layers each, and one more to the first capacity % layers.
    """
    if scope == "shared":
        return [capacity]
    if scope == "per-layer":
        if capacity < layers:
            raise BudgetError(
                f"scope per-layer needs a slot for each of {layers} layers: {capacity}"
            )
        return [capacity // layers + (i < capacity % layers) for i in range(layers)]
    raise UnknownName("scope", scope, SCOPES)


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a step's requests, in their order.

    `slots[i]` is where request i is or will be, `hits[i]` is 1 where it already was, `evicted[i]`
    is the piece that made room, or -1. `misses` are the hits that are 0. `pinned` says that the
    step's pieces await a `release`.
    """

    slots: Ints
    hits: Ints
    evicted: Ints
    misses: int
    pinned: bool


@cache
def bind(policy: Policy) -> tuple[Any, Any, Any]:
    """(serve, evict, evict_victim) for a policy, each compiled when it is first called."""
    on_hit, on_insert, on_evict, victim = (
        policy.on_hit,
        policy.on_insert,
        policy.on_evict,
        policy.victim,
    )

    @njit(nogil=True)
    def evict(state: State, piece: int, now: int) -> None:
        slot, group = state.slot_of[piece], state.group_of[piece]
        on_evict(state, piece, now)
        state.slot_of[piece] = -1
        state.piece_in[slot] = -1
        state.free[state.first[group] + state.free_count[group]] = slot
        state.free_count[group] += 1

    @njit(nogil=True)
    def serve(state: State, pieces: Ints, now: int, pin: bool, out: Ints) -> int:
        """Request the pieces one by one; out [3, n]: slots, hits, evicted. Misses, or -1."""
        if pin:
            for piece in pieces:
                state.pinned[piece] += 1
        misses = 0
        for i, piece in enumerate(pieces):
            out[1, i], out[2, i] = 1, -1
            if state.slot_of[piece] >= 0:
                on_hit(state, piece, now)
            else:
                misses += 1
                out[1, i] = 0
                group = state.group_of[piece]
                if state.free_count[group] == 0:
                    out[2, i] = victim(state, group, now)
                    if out[2, i] < 0:
                        return -1
                    evict(state, out[2, i], now)
                state.free_count[group] -= 1
                slot = state.free[state.first[group] + state.free_count[group]]
                state.slot_of[piece], state.piece_in[slot] = slot, piece
                on_insert(state, piece, now)
            out[0, i] = state.slot_of[piece]
        return misses

    @njit(nogil=True)
    def evict_victim(state: State, group: int, now: int) -> int:
        """Evict the policy's victim of a group. The piece, or -1 where all are pinned."""
        piece = victim(state, group, now)
        if piece >= 0:
            evict(state, piece, now)
        return int(piece)

    return serve, evict, evict_victim


def compile_for(policy: Policy) -> None:
    """Compile a policy's step now; the first request would otherwise wait for it."""
    Cache(Pieces.whole([0, 1], [1]), 1, policy).serve(np.zeros(1, np.int64), 0)


class Cache:
    """Slots for pieces, in groups of a fixed capacity, under one policy.

    A miss always inserts (demand paging, no bypass). The pieces of a step are pinned while it is
    served, unless their group has fewer slots than the step asks of it.
    """

    def __init__(
        self, pieces: Pieces, capacity: int, policy: Policy, scope: str = "shared", seed: int = 0
    ) -> None:
        self.pieces, self.policy, self.scope = pieces, policy, scope
        self._serve, self._evict, self._evict_victim = bind(policy)
        sizes = split_capacity(capacity, pieces.layers, scope)
        group_of = np.zeros(len(pieces), np.int64) if len(sizes) == 1 else pieces.layer.copy()
        ints, floats = policy.memory(len(pieces), len(sizes), seed)
        self.state = State(
            slot_of=np.full(len(pieces), -1, np.int64),
            piece_in=np.empty(0, np.int64),
            pinned=np.zeros(len(pieces), np.int64),
            group_of=group_of,
            free=np.empty(0, np.int64),
            first=np.zeros(len(sizes) + 1, np.int64),
            free_count=np.zeros(len(sizes), np.int64),
            ints=ints,
            floats=floats,
        )
        self._allocate(sizes)

    @property
    def capacity(self) -> int:
        return self.state.piece_in.size

    def serve(self, pieces: Ints, now: int, pin: str = "step") -> Served:
        """Request distinct pieces of one layer, in this order.

        With pin="step" they stay pinned until `release`; a step larger than its group is not.
        """
        group = self.state.group_of[pieces[0]] if pieces.size else 0
        room = self.state.first[group + 1] - self.state.first[group]
        pinned = pin == "step" and pieces.size <= room
        out = np.empty((3, pieces.size), np.int64)
        misses = self._serve(self.state, pieces, now, pinned, out)
        if misses < 0:
            raise RuntimeError("no piece can be evicted: every resident is pinned")
        return Served(out[0], out[1], out[2], int(misses), pinned)

    def release(self, pieces: Ints) -> None:
        """Undo the pins of a step that is over."""
        self.state.pinned[pieces] -= 1

    def remove(self, piece: int, now: int) -> None:
        """Forget a piece whose bytes did not arrive."""
        if self.state.slot_of[piece] >= 0:
            self._evict(self.state, piece, now)

    def residents(self) -> Ints:
        """Pieces that have a slot, ascending."""
        return np.sort(self.state.piece_in[self.state.piece_in >= 0])

    def resize(self, capacity: int, now: int) -> list[tuple[int, int, int]]:
        """Change the number of slots; victims go by the policy.

        Returns the moves (piece, from slot, to slot) that bring every remaining piece into a slot
        of its group. Done in this order, none overwrites a piece that has still to move.
        """
        state, sizes = self.state, split_capacity(capacity, self.pieces.layers, self.scope)
        for group, size in enumerate(sizes):
            held = [p for p in self.residents() if state.group_of[p] == group]
            for _ in range(len(held) - size):
                if self._evict_victim(state, group, now) < 0:
                    raise RuntimeError("a pinned piece cannot be evicted")
        return self._allocate(sizes)

    def _allocate(self, sizes: Sequence[int]) -> list[tuple[int, int, int]]:
        """Lay out slots for the groups; keep each resident's slot where the group still has it."""
        old = {int(p): int(self.state.slot_of[p]) for p in self.residents()}
        first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.state.first[:] = first
        total = int(first[-1])
        grows = total > self.capacity
        self.state = self.state._replace(
            piece_in=np.full(total, -1, np.int64), free=np.empty(total, np.int64)
        )
        state, homeless = self.state, []
        for piece, slot in old.items():
            group = state.group_of[piece]
            if first[group] <= slot < first[group + 1]:
                state.piece_in[slot] = piece
            else:
                homeless.append(piece)
        moves = []
        for piece in homeless:
            group = state.group_of[piece]
            slot = next(s for s in range(first[group], first[group + 1]) if state.piece_in[s] < 0)
            state.piece_in[slot] = piece
            state.slot_of[piece] = slot
            moves.append((piece, old[piece], slot))
        for group, (begin, end) in enumerate(pairwise(first)):
            free = [s for s in range(end - 1, begin - 1, -1) if state.piece_in[s] < 0]
            state.free[begin : begin + len(free)] = free
            state.free_count[group] = len(free)
        # All group borders move the same way, so all moves do too: begin at the end they go to.
        return sorted(moves, key=lambda move: -move[1] if grows else move[1])
