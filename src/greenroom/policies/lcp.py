"""LCP eviction policy: evict the expert with the lowest priority mu * rho ** (nu / omega).

mu is the number of an expert's requests since the start, which survives eviction, and nu is the
number of tokens since its last request. Source: MoEpic, section 3.3, equation 4, with the defaults
rho = 0.25 and omega = 128. Of equal experts, the one requested least recently is evicted.

All priorities fall by the same factor for every token, so cached experts are ranked by a key that
does not change between their requests. P experts are in blocks of about sqrt(P). A block's bound is
never above its smallest key. The key of a cached expert only rises, so a request writes just the
key, and a block's bound is corrected when the block is searched.
"""

from __future__ import annotations

from math import log2
from typing import NamedTuple

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import (
    CacheState,
    Floats,
    LogicalTime,
    Policy,
    PolicyOption,
    PolicySetup,
    compiled,
)

NEAR = 1e-9
NONE = np.inf  # the key of pieces that are not resident


class LcpState(NamedTuple):
    """State arrays of the LCP eviction policy.

    P experts, in B blocks of G slot groups.
    """

    key: Floats  # [P] log2 mu + last * fade
    tie: Ints  # [P] index of the last request
    block_of: Ints  # [P]
    begin: Ints  # [B + 1] block b has the pieces begin[b] .. begin[b + 1] - 1
    blocks: Ints  # [G + 1] group g has the blocks blocks[g] .. blocks[g + 1] - 1
    bound: Floats  # [B]
    bound_tie: Ints  # [B]
    count: Ints  # type: ignore[assignment]  # [P] mu
    last: Ints  # [P] token of the last request
    numbers: Floats  # rho, omega, fade = log2(1 / rho) / omega


def build_state(setup: PolicySetup) -> LcpState:
    side = max(8, int(np.sqrt(setup.pieces)))
    sizes = np.bincount(setup.group_of, minlength=setup.groups)
    ends = np.cumsum(sizes)
    begins = [
        b
        for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)
        for b in range(end - size, end, side)
    ]
    begin = np.array([*begins, setup.pieces], np.int64)
    rho, omega = setup.options["rho"], setup.options["omega"]
    none = np.zeros(setup.pieces, np.int64)
    return LcpState(
        key=np.full(setup.pieces, NONE),
        tie=none,
        block_of=np.repeat(np.arange(len(begins), dtype=np.int64), np.diff(begin)),
        begin=begin,
        blocks=np.searchsorted(begin, np.concatenate([[0], ends])).astype(np.int64),
        bound=np.full(len(begins), NONE),
        bound_tie=np.zeros(len(begins), np.int64),
        count=none.copy(),
        last=none.copy(),
        numbers=np.array([rho, omega, log2(1 / rho) / omega]),
    )


@compiled
def on_hit(cache: CacheState, state: LcpState, piece: int, now: LogicalTime) -> None:
    state.count[piece] += 1
    state.last[piece], state.tie[piece] = now.token, now.index
    state.key[piece] = np.log2(state.count[piece]) + now.token * state.numbers[2]


@compiled
def on_insert(cache: CacheState, state: LcpState, piece: int, now: LogicalTime) -> None:
    on_hit(cache, state, piece, now)
    block, key, tie = state.block_of[piece], state.key[piece], state.tie[piece]
    if key < state.bound[block] or (key == state.bound[block] and tie < state.bound_tie[block]):
        state.bound[block], state.bound_tie[block] = key, tie


@compiled
def on_evict(cache: CacheState, state: LcpState, piece: int, now: LogicalTime) -> None:
    state.key[piece] = NONE


@compiled
def lowest_unpinned(state: LcpState, group: int, cache: CacheState) -> int:
    """Find a slot group's unpinned cached expert with the smallest LCP key; -1 if none."""
    first, end = state.blocks[group], state.blocks[group + 1]
    likely = first
    for block in range(first + 1, end):
        if state.bound[block] < state.bound[likely]:
            likely = block
    best, best_key, best_tie = -1, NONE, 0
    for i in range(first - 1, end):
        block = likely if i < first else i
        bound, bound_tie = state.bound[block], state.bound_tie[block]
        if bound > best_key or (bound == best_key and bound_tie >= best_tie):
            continue
        if i == likely:
            continue
        bound, bound_tie = NONE, 0
        for piece in range(state.begin[block], state.begin[block + 1]):
            key, tie = state.key[piece], state.tie[piece]
            if key < bound or (key == bound and tie < bound_tie):
                bound, bound_tie = key, tie
            better = key < best_key or (key == best_key and tie < best_tie)
            if better and cache.pinned[piece] == 0:
                best, best_key, best_tie = piece, key, tie
        state.bound[block], state.bound_tie[block] = bound, bound_tie
    return best


@compiled
def priority(state: LcpState, piece: int, now: LogicalTime) -> float:
    """Compute an expert's priority under the LCP eviction policy (MoEpic, equation 4)."""
    rho, omega = state.numbers[0], state.numbers[1]
    return float(state.count[piece] * rho ** ((now.token - state.last[piece]) / omega))


@compiled
def victim(cache: CacheState, state: LcpState, group: int, piece: int, now: LogicalTime) -> int:
    chosen = lowest_unpinned(state, group, cache)
    if chosen < 0:
        return -1
    # Logarithms are rounded, and might separate equal priorities: near the smallest, P decides.
    near = state.key[chosen] + NEAR
    least = np.inf
    for block in range(state.blocks[group], state.blocks[group + 1]):
        if state.bound[block] <= near:
            for other in range(state.begin[block], state.begin[block + 1]):
                if state.key[other] <= near and cache.pinned[other] == 0:
                    value = priority(state, other, now)
                    if value < least or (value == least and state.tie[other] < state.tie[chosen]):
                        least, chosen = value, other
    return int(chosen)


lcp = Policy(
    "lcp",
    build_state,
    victim,
    on_hit,
    on_insert,
    on_evict,
    options=(
        PolicyOption("rho", 0.25, "factor of a piece's priority every omega tokens", 1e-6, 1),
        PolicyOption("omega", 128, "tokens after which rho applies once", 1),
    ),
)
