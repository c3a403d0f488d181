"""Circular doubly linked lists in a flat array, one a group: what queue-like policies keep.

Nodes 0 .. P-1 are pieces, node P + g is the head of group g's list; `ints[n]` is the node before
n, `ints[N + n]` the node after it, N = P + G.
"""

from __future__ import annotations

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import Floats, State, compiled


def memory(pieces: int, groups: int, seed: int) -> tuple[Ints, Floats]:
    """Empty lists: every node points at itself."""
    nodes = np.arange(pieces + groups, dtype=np.int64)
    return np.concatenate([nodes, nodes]), np.empty(0)


@compiled
def unlink(state: State, piece: int) -> None:
    """Take a piece out of its list."""
    links = state.ints
    n = links.size // 2
    before, after = links[piece], links[n + piece]
    links[n + before] = after
    links[after] = before


@compiled
def push(state: State, piece: int) -> None:
    """Put a piece at the front of its group's list."""
    links = state.ints
    n = links.size // 2
    head = state.slot_of.size + state.group_of[piece]
    first = links[n + head]
    links[piece], links[n + piece] = head, first
    links[n + head] = piece
    links[first] = piece


@compiled
def last(state: State, group: int) -> int:
    """The piece nearest the back of the group's list that is not pinned, or -1."""
    head = state.slot_of.size + group
    piece = state.ints[head]
    while piece != head:
        if state.pinned[piece] == 0:
            return int(piece)
        piece = state.ints[piece]
    return -1
