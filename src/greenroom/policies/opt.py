"""OPT eviction policy: evict the expert requested farthest in the future (Belady, 1966).

No policy that inserts every miss has fewer misses, as long as no expert is pinned. Experts that are
never requested again are evicted first, of these the least recently requested one. OPT needs the
complete trace of requests, so it runs in simulations only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from greenroom.core.compiling.compile_cache import jit
from greenroom.core.pieces import Ints
from greenroom.core.policy import CacheState, Ids, LogicalTime, Policy, PolicySetup, compiled
from greenroom.policies.helpers import bitsets, lists
from greenroom.policies.helpers.bitsets import Bits
from greenroom.policies.helpers.lists import Lists

NEVER = -1


class OptState(NamedTuple):
    """State arrays of the OPT eviction policy.

    Requests are numbered by slot group, and in trace order within a group. `awaited` has the number
    of each cached expert's next request: the victim is the expert with the group's largest number.
    Numbers are int32 if they fit, since they take most of the memory.
    """

    next_number: Ids  # [N] number of the next request for the piece of request i, or NEVER
    piece_of: Ids  # [N] the piece of each number
    awaited: Bits
    next_of: Ints  # [P] a resident's number in `awaited`, or NEVER
    begin: Ints  # [G + 1] group g has the numbers begin[g] .. begin[g + 1] - 1
    finished: Lists  # pieces never requested again, one list a group


@jit
def _look_ahead(
    pieces: Ids,
    group_of: Ints,
    begin: Ints,
    after: Ids,
    next_number: Ids,
    piece_of: Ids,
    reorder: bool,
) -> None:
    """Compute the number of the next request for each request's expert.

    Fills `next_number`, and with `reorder` also `piece_of`. `after` [P] is all NEVER at first.
    """
    end = begin[1:].copy()
    for i in range(pieces.size - 1, -1, -1):
        piece = pieces[i]
        group = group_of[piece]
        end[group] -= 1
        next_number[i] = after[piece]
        after[piece] = end[group]
        if reorder:
            piece_of[end[group]] = piece


@jit
def next_uses(pieces: Ids, count: int) -> Ints:
    """Find the index of the next request for the same expert, for each request.

    pieces: the ids of the requested experts, all below `count`, in the order of requests
    A last request of an expert gets an index past the end, a different one for each expert.
    """
    after = pieces.size + np.arange(count)
    result = np.empty(pieces.size, np.int64)
    for i in range(pieces.size - 1, -1, -1):
        result[i] = after[pieces[i]]
        after[pieces[i]] = i
    return result


def build_state(setup: PolicySetup) -> OptState:
    pieces = setup.required_trace.pieces
    dtype: Any = np.int32 if pieces.size < 2**31 else np.int64
    sizes = np.bincount(pieces, minlength=setup.pieces)
    per_group = np.bincount(setup.group_of, weights=sizes, minlength=setup.groups)
    begin = np.concatenate([[0], np.cumsum(per_group)]).astype(np.int64)
    next_number: Ids = np.empty(pieces.size, dtype)
    piece_of = pieces if setup.groups == 1 else np.empty(pieces.size, pieces.dtype)
    after = np.full(setup.pieces, NEVER, dtype)
    _look_ahead(pieces, setup.group_of, begin, after, next_number, piece_of, setup.groups > 1)
    return OptState(
        next_number,
        piece_of,
        bitsets.empty(pieces.size + 1),
        np.full(setup.pieces, NEVER, np.int64),
        begin,
        lists.empty(setup.pieces, setup.groups),
    )


@compiled
def on_insert(cache: CacheState, state: OptState, piece: int, now: LogicalTime) -> None:
    next_number = state.next_number[now.index]
    state.next_of[piece] = next_number
    if next_number >= 0:
        bitsets.insert(state.awaited, next_number)
    else:
        lists.push(state.finished, cache.slot_of.size + cache.group_of[piece], piece)


@compiled
def on_evict(cache: CacheState, state: OptState, piece: int, now: LogicalTime) -> None:
    if state.next_of[piece] >= 0:
        bitsets.discard(state.awaited, state.next_of[piece])
    else:
        lists.unlink(state.finished, piece)


@compiled
def on_hit(cache: CacheState, state: OptState, piece: int, now: LogicalTime) -> None:
    on_evict(cache, state, piece, now)
    on_insert(cache, state, piece, now)


@compiled
def victim(cache: CacheState, state: OptState, group: int, piece: int, now: LogicalTime) -> int:
    chosen = lists.last_unpinned(state.finished, cache.slot_of.size + group, cache)
    if chosen >= 0:
        return int(chosen)
    number = bitsets.largest_below(state.awaited, state.begin[group + 1])
    while number >= state.begin[group]:
        farthest = state.piece_of[number]
        if cache.pinned[farthest] == 0:
            return int(farthest)
        number = bitsets.largest_below(state.awaited, number)
    return -1


opt = Policy("opt", build_state, victim, on_hit, on_insert, on_evict, needs_trace=True)
