"""Buckets of cached experts with equal keys, for eviction policies that count requests.

A bucket has the experts of one key, such as their number of requests. The buckets are linked in
ascending order of keys. Moving an expert walks over the buckets between its old and its new key,
which are few if keys rise by little. In a bucket, the expert placed least recently is evicted
first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import CacheState, PolicySetup, compiled
from greenroom.policies.helpers import lists
from greenroom.policies.helpers.lists import Lists


class Buckets(NamedTuple):
    """Arrays of the buckets of cached experts with equal keys.

    P experts, G slot groups, at most P buckets.
    """

    key: Ints  # [P] of each bucket
    order: Lists  # of buckets, one a group, the one of the lowest key in front
    members: Lists  # of pieces, one a bucket, the newest in front
    bucket_of: Ints  # [P]
    spare: Ints  # [P] stack of buckets that are not in use
    spares: Ints  # [1]


def empty(setup: PolicySetup) -> Buckets:
    """Create the arrays of buckets of cached experts, all empty."""
    pieces = setup.pieces
    return Buckets(
        key=np.zeros(pieces, np.int64),
        order=lists.one_list_per_group(setup),
        members=lists.empty(pieces, pieces),
        bucket_of=np.full(pieces, -1, np.int64),
        spare=np.arange(pieces, dtype=np.int64),
        spares=np.array([pieces], np.int64),
    )


@compiled
def _put(b: Buckets, head: int, below: int, piece: int, key: int) -> None:
    """Put an expert into the bucket of its key.

    The search goes upwards from `below`: the head, or a bucket of no higher key.
    """
    higher = b.order.after
    bucket = below if below != head and b.key[below] == key else higher[below]
    while bucket != head and b.key[bucket] < key:
        bucket = higher[bucket]
    if bucket == head or b.key[bucket] != key:
        below = b.order.before[bucket]
        b.spares[0] -= 1
        bucket = b.spare[b.spares[0]]
        b.key[bucket] = key
        lists.push(b.order, below, bucket)
    lists.push(b.members, b.key.size + bucket, piece)
    b.bucket_of[piece] = bucket


@compiled
def drop(b: Buckets, piece: int) -> int:
    """Remove an expert from its bucket.

    Returns the bucket, or the one below it if it became empty; a search upwards may start there.
    """
    bucket = b.bucket_of[piece]
    lists.unlink(b.members, piece)
    head = b.key.size + bucket
    if b.members.after[head] != head:
        return int(bucket)
    below = b.order.before[bucket]
    lists.unlink(b.order, bucket)
    b.spare[b.spares[0]] = bucket
    b.spares[0] += 1
    return int(below)


@compiled
def place(b: Buckets, group: int, piece: int, key: int) -> None:
    """Insert an expert, which is in no bucket, into the bucket of its key."""
    head = b.key.size + group
    _put(b, head, head, piece, key)


@compiled
def rise(b: Buckets, group: int, piece: int, key: int) -> None:
    """Raise a cached expert's key, and move the expert to that key's bucket."""
    head, bucket, members = b.key.size + group, b.bucket_of[piece], b.members
    above = b.order.after[bucket]
    only_member = members.before[piece] == members.after[piece]  # both are the bucket's head
    if only_member and (above == head or b.key[above] > key):
        b.key[bucket] = key
    else:
        below = drop(b, piece)
        _put(b, head, below, piece, key)


@compiled
def lowest_unpinned(b: Buckets, group: int, cache: CacheState) -> int:
    """Find a slot group's unpinned cached expert with the smallest key; -1 if none.

    Of equal experts, the one placed least recently is found.
    """
    pieces = b.key.size
    bucket = b.order.after[pieces + group]
    while bucket < pieces:
        piece = lists.last_unpinned(b.members, pieces + bucket, cache)
        if piece >= 0:
            return int(piece)
        bucket = b.order.after[bucket]
    return -1
