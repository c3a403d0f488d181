"""Binary heaps of pieces, one a group, smallest key on top: for policies that rank by a number.

Equal keys are ordered by `tie`, which is the index of the piece's last request: ties go to the
least recently requested. Keys that rise are only noted, and the piece is moved when it comes to the
top; so a hit costs two writes, and many hits cost one move.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import Floats, Setup, State, compiled


class Heaps(NamedTuple):
    """P pieces, G groups; the heap of group g is `heap[base[g] : base[g] + size[g]]`."""

    heap: Ints  # [P] pieces
    at: Ints  # [P] where in `heap` a piece is, -1 where it is not
    key: Floats  # [P] by which a piece has its place; never above `due`
    tie: Ints  # [P]
    due: Floats  # [P] by which it should have it
    due_tie: Ints  # [P]
    base: Ints  # [G + 1]
    size: Ints  # [G]
    aside: Ints  # [P] pieces taken off for the length of a call


def empty(setup: Setup) -> Heaps:
    """Heaps with nothing in them. A group's part has room for all of its pieces."""
    pieces = setup.pieces
    sizes = np.bincount(setup.group_of, minlength=setup.groups)
    return Heaps(
        heap=np.zeros(pieces, np.int64),
        at=np.full(pieces, -1, np.int64),
        key=np.zeros(pieces),
        tie=np.zeros(pieces, np.int64),
        due=np.zeros(pieces),
        due_tie=np.zeros(pieces, np.int64),
        base=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        size=np.zeros(setup.groups, np.int64),
        aside=np.zeros(pieces, np.int64),
    )


@compiled
def _less(heaps: Heaps, a: int, b: int) -> bool:
    return bool(
        heaps.key[a] < heaps.key[b] or (heaps.key[a] == heaps.key[b] and heaps.tie[a] < heaps.tie[b])
    )


@compiled
def _up(heaps: Heaps, base: int, i: int, piece: int) -> None:
    """Bring a piece into its place from position i upwards."""
    while i > 0:
        parent = heaps.heap[base + (i - 1) // 2]
        if not _less(heaps, piece, parent):
            break
        heaps.heap[base + i] = parent
        heaps.at[parent] = i
        i = (i - 1) // 2
    heaps.heap[base + i] = piece
    heaps.at[piece] = i


@compiled
def _down(heaps: Heaps, base: int, size: int, i: int, piece: int) -> None:
    """Bring a piece into its place from position i downwards."""
    while 2 * i + 1 < size:
        j = 2 * i + 1
        child = heaps.heap[base + j]
        if j + 1 < size and _less(heaps, heaps.heap[base + j + 1], child):
            j += 1
            child = heaps.heap[base + j]
        if not _less(heaps, child, piece):
            break
        heaps.heap[base + i] = child
        heaps.at[child] = i
        i = j
    heaps.heap[base + i] = piece
    heaps.at[piece] = i


@compiled
def push(heaps: Heaps, group: int, piece: int, key: float, tie: int) -> None:
    """Take a piece in."""
    heaps.key[piece] = heaps.due[piece] = key
    heaps.tie[piece] = heaps.due_tie[piece] = tie
    size = heaps.size[group]
    heaps.size[group] += 1
    _up(heaps, heaps.base[group], size, piece)


@compiled
def rise(heaps: Heaps, piece: int, key: float, tie: int) -> None:
    """Give a piece a key that is not below the one it has."""
    heaps.due[piece] = key
    heaps.due_tie[piece] = tie


@compiled
def sink(heaps: Heaps, group: int, piece: int, key: float, tie: int) -> None:
    """Give a piece a key that is not above the one it has."""
    heaps.key[piece] = heaps.due[piece] = key
    heaps.tie[piece] = heaps.due_tie[piece] = tie
    _up(heaps, heaps.base[group], heaps.at[piece], piece)


@compiled
def drop(heaps: Heaps, group: int, piece: int) -> None:
    """Take a piece out."""
    base, i = heaps.base[group], heaps.at[piece]
    heaps.size[group] -= 1
    size = heaps.size[group]
    heaps.at[piece] = -1
    if i < size:
        moved = heaps.heap[base + size]
        if i > 0 and _less(heaps, moved, heaps.heap[base + (i - 1) // 2]):
            _up(heaps, base, i, moved)
        else:
            _down(heaps, base, size, i, moved)


@compiled
def top(heaps: Heaps, group: int) -> int:
    """The piece with the smallest key, or -1."""
    base = heaps.base[group]
    while heaps.size[group] > 0:
        piece = heaps.heap[base]
        if heaps.key[piece] == heaps.due[piece] and heaps.tie[piece] == heaps.due_tie[piece]:
            return int(piece)
        heaps.key[piece], heaps.tie[piece] = heaps.due[piece], heaps.due_tie[piece]
        _down(heaps, base, heaps.size[group], 0, piece)
    return -1


@compiled
def lowest(heaps: Heaps, group: int, state: State) -> int:
    """The piece with the smallest key that is not pinned, or -1."""
    best, taken = top(heaps, group), 0
    while best >= 0 and state.pinned[best] > 0:
        heaps.aside[taken] = best
        taken += 1
        drop(heaps, group, best)
        best = top(heaps, group)
    for i in range(taken):
        piece = heaps.aside[i]
        push(heaps, group, piece, heaps.due[piece], heaps.due_tie[piece])
    return int(best)
