"""Residents in buckets of equal whole keys, the buckets in a list by key: for policies that count.

To move a piece costs a walk over the keys between, which are few where keys rise by little. In a
bucket the least recently placed piece comes first, so that ties go to the least recently requested.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import Setup, State, compiled


class Buckets(NamedTuple):
    """P pieces, G groups, at most P buckets at a time. Nodes of the lists: buckets 0 .. P-1, then a
    head for each group; pieces 0 .. P-1, then a head for each bucket."""

    key: Ints  # [P] of each bucket
    lower: Ints  # [P + G] the bucket before a bucket; a head's is the highest
    higher: Ints  # [P + G] the bucket after it; a head's is the lowest
    older: Ints  # [2 P] the piece before a piece; a bucket's head has the newest
    newer: Ints  # [2 P] the piece after it; a bucket's head has the oldest
    bucket_of: Ints  # [P]
    spare: Ints  # [P] stack of buckets that are not in use
    spares: Ints  # [1]


def empty(setup: Setup) -> Buckets:
    """No bucket in use."""
    pieces, groups = setup.pieces, setup.groups
    nodes = np.arange(pieces + groups, dtype=np.int64)
    members = np.arange(2 * pieces, dtype=np.int64)
    return Buckets(
        key=np.zeros(pieces, np.int64),
        lower=nodes,
        higher=nodes.copy(),
        older=members,
        newer=members.copy(),
        bucket_of=np.full(pieces, -1, np.int64),
        spare=np.arange(pieces, dtype=np.int64),
        spares=np.array([pieces], np.int64),
    )


@compiled
def _put(b: Buckets, head: int, below: int, piece: int, key: int) -> None:
    """Place a piece, walking up from a node whose key is not above the piece's: a bucket or the
    head."""
    pieces = b.key.size
    above = below if below != head and b.key[below] == key else b.higher[below]
    while above != head and b.key[above] < key:
        above = b.higher[above]
    if above != head and b.key[above] == key:
        bucket = above
    else:
        b.spares[0] -= 1
        bucket = b.spare[b.spares[0]]
        b.key[bucket] = key
        below = b.lower[above]
        b.lower[bucket], b.higher[bucket] = below, above
        b.higher[below] = bucket
        b.lower[above] = bucket
    node = pieces + bucket
    newest = b.older[node]
    b.older[piece], b.newer[piece] = newest, node
    b.newer[newest] = piece
    b.older[node] = piece
    b.bucket_of[piece] = bucket


@compiled
def drop(b: Buckets, piece: int) -> int:
    """Take a piece out. The bucket, or node, below which it was, to walk up from."""
    bucket = b.bucket_of[piece]
    older, newer = b.older[piece], b.newer[piece]
    b.newer[older] = newer
    b.older[newer] = older
    if older != newer or older < b.key.size:
        return int(bucket)
    below, above = b.lower[bucket], b.higher[bucket]
    b.higher[below] = above
    b.lower[above] = below
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
    head, pieces, bucket = b.key.size + group, b.key.size, b.bucket_of[piece]
    above = b.higher[bucket]
    alone = b.older[piece] == b.newer[piece] and b.older[piece] >= pieces
    if alone and (above == head or b.key[above] > key):
        b.key[bucket] = key
    else:
        below = drop(b, piece)
        _put(b, head, below, piece, key)


@compiled
def lowest(b: Buckets, group: int, state: State) -> int:
    """The piece with the smallest key that is not pinned, or -1."""
    pieces = b.key.size
    head = pieces + group
    bucket = b.higher[head]
    while bucket != head:
        piece = b.newer[pieces + bucket]
        while piece < pieces:
            if state.pinned[piece] == 0:
                return int(piece)
            piece = b.newer[piece]
        bucket = b.higher[bucket]
    return -1
