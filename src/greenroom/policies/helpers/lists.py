"""Circular doubly linked lists in two flat arrays: what queue-like policies keep.

Nodes 0 .. P-1 are pieces, node P + i is the head of list i. A piece is in one list at most.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import CacheState, PolicySetup, compiled


class Lists(NamedTuple):
    """P pieces and N lists; the node after a head is the front of its list, the one before it the
    back."""

    before: Ints  # [P + N]
    after: Ints  # [P + N]


def empty(pieces: int, lists: int) -> Lists:
    """Lists with nothing in them: every node points at itself."""
    return Lists(*(np.arange(pieces + lists, dtype=np.int64) for _ in range(2)))


def one_a_group(setup: PolicySetup) -> Lists:
    """The memory of a policy that keeps the residents of each group in one list."""
    return empty(setup.pieces, setup.groups)


@compiled
def unlink(lists: Lists, piece: int) -> None:
    """Take a piece out of its list."""
    before, after = lists.before[piece], lists.after[piece]
    lists.after[before] = after
    lists.before[after] = before


@compiled
def push(lists: Lists, head: int, piece: int) -> None:
    """Put a piece at the front of the list with that head."""
    first = lists.after[head]
    lists.before[piece], lists.after[piece] = head, first
    lists.after[head] = piece
    lists.before[first] = piece


@compiled
def last(lists: Lists, head: int, cache: CacheState) -> int:
    """The piece nearest the back of the list that is not pinned, or -1."""
    piece = lists.before[head]
    while piece != head:
        if cache.pinned[piece] == 0:
            return int(piece)
        piece = lists.before[piece]
    return -1


QUEUES = 4  # that a group has at most


class Queues(NamedTuple):
    """Several queues a group, numbered 0 .. QUEUES - 1, the newest in front; each knows its size.
    Residents are in them, and pieces that a policy remembers."""

    lists: Lists
    inside: Ints  # [P] the queue that a piece is in, or -1
    size: Ints  # [G, QUEUES]


def empty_queues(setup: PolicySetup) -> Queues:
    """Queues with nothing in them."""
    return Queues(
        empty(setup.pieces, QUEUES * setup.groups),
        np.full(setup.pieces, -1, np.int64),
        np.zeros((setup.groups, QUEUES), np.int64),
    )


@compiled
def head_of(queues: Queues, group: int, which: int) -> int:
    """The head of a queue's list."""
    return int(queues.inside.size + QUEUES * group + which)


@compiled
def leave(queues: Queues, group: int, piece: int) -> None:
    """Take a piece out of its queue."""
    queues.size[group, queues.inside[piece]] -= 1
    queues.inside[piece] = -1
    unlink(queues.lists, piece)


@compiled
def enter(queues: Queues, group: int, piece: int, which: int) -> None:
    """Put a piece that is in no queue at the front of one."""
    queues.size[group, which] += 1
    queues.inside[piece] = which
    push(queues.lists, head_of(queues, group, which), piece)


@compiled
def forget_oldest(queues: Queues, group: int, which: int) -> None:
    """Take the oldest piece out of a queue that is not empty."""
    leave(queues, group, queues.lists.before[head_of(queues, group, which)])


@compiled
def oldest(queues: Queues, group: int, which: int, cache: CacheState) -> int:
    """The oldest piece of a queue that is not pinned, or -1."""
    return int(last(queues.lists, head_of(queues, group, which), cache))
