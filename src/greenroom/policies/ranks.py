"""Residents ranked by a number, smallest first: for policies that evict by a score of each piece.

Pieces lie in blocks of about sqrt(P). A block's bound is never above its smallest key, so that a
key is changed by one write, and a bound is put right only when its block is searched. Equal keys
are ordered by `tie`, the index of the piece's last request: ties go to the least recently
requested.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import Floats, Setup, State, compiled

NONE = np.inf  # the key of what is not resident


class Ranks(NamedTuple):
    """P pieces in B blocks of G groups; pieces of a block have consecutive ids."""

    key: Floats  # [P]
    tie: Ints  # [P]
    block_of: Ints  # [P]
    begin: Ints  # [B + 1] block b has the pieces begin[b] .. begin[b + 1] - 1
    blocks: Ints  # [G + 1] group g has the blocks blocks[g] .. blocks[g + 1] - 1
    bound: Floats  # [B]
    bound_tie: Ints  # [B]


def empty(setup: Setup) -> Ranks:
    """Ranks with nothing in them."""
    side = max(8, int(np.sqrt(setup.pieces)))
    sizes = np.bincount(setup.group_of, minlength=setup.groups)
    ends = np.cumsum(sizes)
    begins = [
        b
        for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)
        for b in range(end - size, end, side)
    ]
    begin = np.array([*begins, setup.pieces], np.int64)
    return Ranks(
        key=np.full(setup.pieces, NONE),
        tie=np.zeros(setup.pieces, np.int64),
        block_of=np.repeat(np.arange(len(begins), dtype=np.int64), np.diff(begin)),
        begin=begin,
        blocks=np.searchsorted(begin, np.concatenate([[0], ends])).astype(np.int64),
        bound=np.full(len(begins), NONE),
        bound_tie=np.zeros(len(begins), np.int64),
    )


@compiled
def place(ranks: Ranks, piece: int, key: float, tie: int) -> None:
    """Give a resident piece its key."""
    ranks.key[piece], ranks.tie[piece] = key, tie
    block = ranks.block_of[piece]
    if key < ranks.bound[block] or (key == ranks.bound[block] and tie < ranks.bound_tie[block]):
        ranks.bound[block], ranks.bound_tie[block] = key, tie


@compiled
def rise(ranks: Ranks, piece: int, key: float, tie: int) -> None:
    """Give a resident piece a key that is not below the one it has."""
    ranks.key[piece], ranks.tie[piece] = key, tie


@compiled
def drop(ranks: Ranks, piece: int) -> None:
    """The piece is resident no more."""
    ranks.key[piece] = NONE


@compiled
def lowest(ranks: Ranks, group: int, state: State) -> int:
    """The resident with the smallest key that is not pinned, or -1."""
    first, end = ranks.blocks[group], ranks.blocks[group + 1]
    likely = first
    for block in range(first + 1, end):
        if ranks.bound[block] < ranks.bound[likely]:
            likely = block
    best, best_key, best_tie = -1, NONE, 0
    for i in range(first - 1, end):
        block = likely if i < first else i
        bound, bound_tie = ranks.bound[block], ranks.bound_tie[block]
        if bound > best_key or (bound == best_key and bound_tie >= best_tie):
            continue
        if i == likely:
            continue
        bound, bound_tie = NONE, 0
        for piece in range(ranks.begin[block], ranks.begin[block + 1]):
            key, tie = ranks.key[piece], ranks.tie[piece]
            if key < bound or (key == bound and tie < bound_tie):
                bound, bound_tie = key, tie
            better = key < best_key or (key == best_key and tie < best_tie)
            if better and state.pinned[piece] == 0:
                best, best_key, best_tie = piece, key, tie
        ranks.bound[block], ranks.bound_tie[block] = bound, bound_tie
    return best
