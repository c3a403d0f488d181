"""Residents in buckets of equal whole keys, the buckets in a list by key: for policies that count.

To move a piece costs a walk over the keys between, which are few where keys rise by little. In a
bucket the least recently placed piece comes first, so that ties go to the least recently requested.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import CacheState, PolicySetup, compiled
from greenroom.policies.helpers import lists
from greenroom.policies.helpers.lists import Lists


class Buckets(NamedTuple):
    """P pieces, G groups, at most P buckets at a time."""

    key: Ints  # [P] of each bucket
    order: Lists  # of buckets, one a group, the one of the lowest key in front
    members: Lists  # of pieces, one a bucket, the newest in front
    bucket_of: Ints  # [P]
    spare: Ints  # [P] stack of buckets that are not in use
    spares: Ints  # [1]


def empty(setup: PolicySetup) -> Buckets:
    """No bucket in use."""
    pieces = setup.pieces
    return Buckets(
        key=np.zeros(pieces, np.int64),
        order=lists.one_a_group(setup),
        members=lists.empty(pieces, pieces),
        bucket_of=np.full(pieces, -1, np.int64),
        spare=np.arange(pieces, dtype=np.int64),
        spares=np.array([pieces], np.int64),
    )


@compiled
def _put(b: Buckets, head: int, below: int, piece: int, key: int) -> None:
    """Place a piece, walking up from a node whose key is not above the piece's: a bucket or the
    head."""
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
    """Take a piece out. The bucket, or node, below which it was, to walk up from."""
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
    """Take a piece in."""
    head = b.key.size + group
    _put(b, head, head, piece, key)


@compiled
def rise(b: Buckets, group: int, piece: int, key: int) -> None:
    """Give a piece a key that is not below the one it has."""
    head, bucket, members = b.key.size + group, b.bucket_of[piece], b.members
    above = b.order.after[bucket]
    alone = members.before[piece] == members.after[piece]  # both are the bucket's head
    if alone and (above == head or b.key[above] > key):
        b.key[bucket] = key
    else:
        below = drop(b, piece)
        _put(b, head, below, piece, key)


@compiled
def lowest(b: Buckets, group: int, cache: CacheState) -> int:
    """The piece with the smallest key that is not pinned, or -1."""
    pieces = b.key.size
    bucket = b.order.after[pieces + group]
    while bucket < pieces:
        piece = lists.last(b.members, pieces + bucket, cache)
        if piece >= 0:
            return int(piece)
        bucket = b.order.after[bucket]
    return -1
