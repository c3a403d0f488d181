"""Whole miss-ratio curves in one pass: what every capacity would miss, for stack algorithms.

A cache of LRU or OPT holds all that a smaller one does (Mattson et al., 1970, "Evaluation
techniques for storage hierarchies"). So each request has a depth: the smallest capacity at which it
is a hit. Nothing is pinned.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.cache.scope import Scope, split_capacity
from greenroom.core.compiling.compile_cache import jit
from greenroom.core.pieces import Ints
from greenroom.core.policy import Ids
from greenroom.core.stream import Stream
from greenroom.policies.opt import next_uses
from greenroom.sim.replay import layers_of, step_parts


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
    return _curve(stream, offsets, scope, reset, future=False)


def opt_curve(
    stream: Stream, offsets: Ints, *, scope: Scope = "shared", reset: bool = False
) -> Curve:
    """OPT's misses at every capacity; arguments and errors are those of `lru_curve`."""
    return _curve(stream, offsets, scope, reset, future=True)


def _curve(stream: Stream, offsets: Ints, scope: Scope, reset: bool, future: bool) -> Curve:
    layer = layers_of(offsets)
    layers, most = len(offsets) - 1, np.diff(offsets).tolist()
    per_layer = scope != "shared"
    least = layers if per_layer else 1
    split_capacity(least, layers, scope, most)
    group_of = layer if per_layer else np.zeros(layer.size, np.int64)
    groups = layers if per_layer else 1
    # One row of counts a group: how many requests are hits from 1, 2, ... slots on.
    hits = np.zeros((groups, layer.size + 1), np.int64)
    for part in parts_of(stream, reset):
        _stack(stream.pieces[part], group_of, future, hits, np.empty(0, np.int64))
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
    hits = np.zeros((len(offsets) - 1, layer.size + 1), np.int64)
    found = np.zeros(stream.pieces.size, np.int64)
    for part in parts_of(stream, reset):
        _stack(stream.pieces[part], layer, False, hits, found[part])
    return found


@jit
def _stack(pieces: Ids, group_of: Ints, future: bool, hits: Ints, found: Ints) -> None:
    """Add each request to the count of its depth in its group's stack; and write it to `found`,
    where that has room: 0 for the first one of a piece.

    A stack holds a number for each piece: the index of its next request with the `future` (OPT),
    else one that falls with the index of its last request (LRU). The piece requested goes to the
    top; on the way down to where it was, of two pieces that with the smaller number stays and the
    other moves on.
    """
    count = group_of.size
    first, size = np.zeros(hits.shape[0] + 1, np.int64), np.zeros(hits.shape[0], np.int64)
    for group in group_of:
        first[group + 1] += 1
    first = first.cumsum()
    stack, last = np.empty(count, np.int64), np.full(count, -1, np.int64)
    following = next_uses(pieces, count) if future else last
    for i in range(pieces.size):
        piece = pieces[i]
        group = group_of[piece]
        wanted, number = -1 - last[piece], -1 - i
        last[piece] = i
        if future:
            wanted, number = i, following[i]
        top, held, depth = first[group], size[group], 0
        moving = number
        while depth < held and (depth == 0 or moving != wanted):
            here = stack[top + depth]
            if depth == 0 or here == wanted:
                stack[top + depth], moving = moving, here
            else:
                stack[top + depth], moving = min(here, moving), max(here, moving)
            depth += 1
        if depth > 0 and moving == wanted:
            hits[group, depth] += 1
            if found.size:
                found[i] = depth
        else:
            stack[top + held] = moving
            size[group] += 1
