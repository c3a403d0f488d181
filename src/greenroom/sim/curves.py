"""Whole miss-ratio curves in one pass: what every capacity would miss, for stack algorithms.

A cache of LRU or OPT holds all that a smaller one does (Mattson et al., 1970, "Evaluation
techniques for storage hierarchies"). So each request has a depth: the smallest capacity at which it
is a hit. Nothing is pinned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from greenroom.core.cache.scope import Scope, split_capacity
from greenroom.core.compiling.compile_cache import jit
from greenroom.core.pieces import Ints
from greenroom.core.policy import Ids
from greenroom.core.stream import Stream
from greenroom.policies.opt import next_uses
from greenroom.sim.replay import check_stream, layers_of, step_parts


class Curve(NamedTuple):
    """`misses[i]` of `requests` requests miss with `capacities[i]` slots, the capacities rising."""

    capacities: Ints
    misses: Ints
    requests: int


def lru_curve(
    stream: Stream, offsets: Ints, *, scope: Scope = "shared", reset: bool = False
) -> Curve:
    """LRU's misses at every capacity that the scope allows, up to all experts.

    `offsets` [layers + 1] are dense ids; `reset` empties the cache before every prompt. Equal to
    `replay` with pin="none". Releases the GIL. UsageError as there.
    """
    return _curve(stream, offsets, scope, reset, _lru_depths)


def opt_curve(
    stream: Stream, offsets: Ints, *, scope: Scope = "shared", reset: bool = False
) -> Curve:
    """OPT's misses at every capacity; arguments and errors are those of `lru_curve`."""
    return _curve(stream, offsets, scope, reset, _opt_depths)


def _curve(
    stream: Stream,
    offsets: Ints,
    scope: Scope,
    reset: bool,
    depths: Callable[[Ids, Ints, Ints, Ints], None],
) -> Curve:
    layer = layers_of(offsets)
    check_stream(stream, layer)
    layers, most = len(offsets) - 1, np.diff(offsets).tolist()
    per_layer = scope != "shared"
    least = layers if per_layer else 1
    split_capacity(least, layers, scope, most)
    group_of = layer if per_layer else np.zeros(layer.size, np.int64)
    groups = layers if per_layer else 1
    sizes = np.bincount(group_of, minlength=groups)
    first = (np.cumsum(sizes) - sizes).astype(np.int64)
    # One row of counts a group: how many requests are hits from 1, 2, ... slots on.
    hits = np.zeros((groups, layer.size + 1), np.int64)
    for part in parts_of(stream, reset):
        depths(stream.pieces[part], group_of, first, hits)
    below = hits.cumsum(axis=1)
    requests = stream.pieces.size
    capacities = np.arange(least, layer.size + 1, dtype=np.int64)
    given = [split_capacity(n, layers, scope, most) for n in capacities.tolist()]
    slots = np.minimum(np.array(given, np.int64), layer.size)
    found = below[np.arange(groups), slots].sum(axis=1)
    return Curve(capacities, requests - found, requests)


def parts_of(stream: Stream, reset: bool) -> list[slice]:
    """The requests that are served by one cache."""
    return [slice(*stream.starts[list(steps)]) for steps in step_parts(stream, reset)]


def lru_depths(stream: Stream, offsets: Ints, *, reset: bool = False) -> Ints:
    """The slots with which each request is a hit where every layer has LRU of its own, [N]; 0 where
    it never is. Arguments as for `lru_curve`."""
    layer = layers_of(offsets)
    check_stream(stream, layer)
    sizes = np.bincount(layer, minlength=len(offsets) - 1)
    first = (np.cumsum(sizes) - sizes).astype(np.int64)
    hits = np.zeros((sizes.size, layer.size + 1), np.int64)
    found = np.zeros(stream.pieces.size, np.int64)
    for part in parts_of(stream, reset):
        _lru_stack(stream.pieces[part], layer, first, hits, found[part])
    return found


WINDOW = 8  # times as many places as pieces
ONE, FULL = np.uint64(1), np.uint64(0xFFFFFFFFFFFFFFFF)


@jit
def _ones(word: Any) -> Any:
    """Bits of a word that are set."""
    word -= (word >> np.uint64(1)) & np.uint64(0x5555555555555555)
    pairs = np.uint64(0x3333333333333333)
    word = (word & pairs) + ((word >> np.uint64(2)) & pairs)
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@jit
def _lru_stack(pieces: Ids, group_of: Ints, first: Ints, hits: Ints, found: Ints) -> None:
    """`_lru_depths`, and in `found` each request's depth, where it has room for them: 0 for the
    first one of a piece.

    Add each request to the count of its depth: the distinct pieces of its group since the last
    request for the same one, itself included.

    Every request takes the next place of its group's row and marks it until the piece is requested
    again; so the marks after a piece's place are the pieces requested since. Marks are bits, and
    counted by the word. Where a row ends, its marks move together at the beginning.
    """
    groups, count = first.size, group_of.size
    size = np.zeros(groups, np.int64)
    for group in group_of:
        size[group] += 1
    # Row g has the words begin[g] .. begin[g + 1] - 1.
    begin = np.zeros(groups + 1, np.int64)
    for group in range(groups):
        begin[group + 1] = begin[group] + (WINDOW * size[group] + 63) // 64
    marks = np.zeros(begin[groups], np.uint64)
    marked = np.zeros(begin[groups], np.int64)
    holder = np.zeros(64 * begin[groups], np.int32)
    place = np.full(count, -1, np.int64)
    end = 64 * begin[:-1]
    for i in range(pieces.size):
        piece = pieces[i]
        group = group_of[piece]
        if end[group] == 64 * begin[group + 1]:
            end[group] = _compact(begin[group], begin[group + 1], marks, marked, holder, place)
        new, old = end[group], place[piece]
        end[group] += 1
        if old >= 0:
            word, bit = old >> 6, ONE << np.uint64(old & 63)
            depth = 1 + _ones(marks[word] & ~((bit << ONE) - ONE))
            for w in range(word + 1, (new >> 6) + 1):
                depth += marked[w]
            hits[group, depth] += 1
            if found.size:
                found[i] = depth
            marks[word] &= ~bit
            marked[word] -= 1
        place[piece], holder[new] = new, piece
        marks[new >> 6] |= ONE << np.uint64(new & 63)
        marked[new >> 6] += 1


def _lru_depths(pieces: Ids, group_of: Ints, first: Ints, hits: Ints) -> None:
    """Add each request to the count of its depth in its group's stack, as `_opt_depths` does."""
    _lru_stack(pieces, group_of, first, hits, np.empty(0, np.int64))


@jit
def _compact(begin: int, end: int, marks: Ints, marked: Ints, holder: Ints, place: Ints) -> int:
    """Move a row's marks to its beginning, in their order. The place after the last."""
    kept = 64 * begin
    for p in range(64 * begin, 64 * end):
        if marks[p >> 6] >> np.uint64(p & 63) & ONE:
            holder[kept] = holder[p]
            place[holder[p]] = kept
            kept += 1
    for word in range(begin, end):
        here = min(max(kept - 64 * word, 0), 64)
        marked[word] = here
        marks[word] = FULL if here == 64 else (ONE << np.uint64(here)) - ONE
    return kept


def _opt_depths(pieces: Ids, group_of: Ints, first: Ints, hits: Ints) -> None:
    _opt_stack(pieces, next_uses(pieces, group_of.size), group_of, first, hits)


@jit
def _opt_stack(pieces: Ids, following: Ints, group_of: Ints, first: Ints, hits: Ints) -> None:
    """Add each request to the count of its depth in OPT's stack.

    A group's stack is kept as the indices of its pieces' next requests; `following` are those of
    each request. The piece requested is the one whose index is now. It goes to the top; on the way
    down to where it was, of two pieces the one requested sooner stays and the other moves on.
    """
    stack = np.empty(group_of.size, np.int64)
    size = np.zeros(first.size, np.int64)
    for i in range(pieces.size):
        group = group_of[pieces[i]]
        top, held = first[group], size[group]
        if held == 0:
            stack[top] = following[i]
            size[group] = 1
            continue
        moving = stack[top]
        stack[top] = following[i]
        depth = 1
        while moving != i and depth < held:
            here = stack[top + depth]
            depth += 1
            if here == i:
                stack[top + depth - 1] = moving
                moving = i
            else:
                stack[top + depth - 1] = min(here, moving)
                moving = max(here, moving)
        if moving == i:
            hits[group, depth] += 1
        else:
            stack[top + held] = moving
            size[group] += 1
