"""Circular doubly linked lists in two flat arrays, for queue-like eviction policies.

Nodes 0 .. P-1 are pieces; node P + i is the head of list i. A piece is in one list at most.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import CacheState, PolicySetup, compiled


class Lists(NamedTuple):
    """Arrays of N circular linked lists of P pieces.

    The node after a head is the front of its list, the node before it the back."""

    before: Ints  # [P + N]
    after: Ints  # [P + N]


def empty(pieces: int, lists: int) -> Lists:
    """Create empty linked lists, in which every node points at itself."""
    return Lists(*(np.arange(pieces + lists, dtype=np.int64) for _ in range(2)))


def one_list_per_group(setup: PolicySetup) -> Lists:
    """Create a policy's state: one empty linked list of cached pieces for each group."""
    return empty(setup.pieces, setup.groups)


@compiled
def unlink(lists: Lists, piece: int) -> None:
    """Remove a piece from its linked list."""
    before, after = lists.before[piece], lists.after[piece]
    lists.after[before] = after
    lists.before[after] = before


@compiled
def push(lists: Lists, head: int, piece: int) -> None:
    """Insert a piece at the front of a linked list, given the list's head."""
    first = lists.after[head]
    lists.before[piece], lists.after[piece] = head, first
    lists.after[head] = piece
    lists.before[first] = piece


@compiled
def last_unpinned(lists: Lists, head: int, cache: CacheState) -> int:
    """Find the unpinned piece nearest to the back of a linked list; -1 if none."""
    piece = lists.before[head]
    while piece != head:
        if cache.pinned[piece] == 0:
            return int(piece)
        piece = lists.before[piece]
    return -1


QUEUES = 4  # of a group, at most


class Queues(NamedTuple):
    """Queues of pieces with their sizes, several for each cache group, newest piece in front.

    They hold residents, and evicted pieces (ghosts) that a policy remembers."""

    lists: Lists
    queue_of: Ints  # [P] the queue of a piece, or -1
    size: Ints  # [G, QUEUES]


def empty_queues(setup: PolicySetup) -> Queues:
    """Create empty queues of pieces for every cache group."""
    return Queues(
        empty(setup.pieces, QUEUES * setup.groups),
        np.full(setup.pieces, -1, np.int64),
        np.zeros((setup.groups, QUEUES), np.int64),
    )


@compiled
def head_of(queues: Queues, group: int, which: int) -> int:
    """Return the list node that stands for the head of a queue of pieces."""
    return int(queues.queue_of.size + QUEUES * group + which)


@compiled
def dequeue(queues: Queues, group: int, piece: int) -> None:
    """Remove a piece from its queue."""
    queues.size[group, queues.queue_of[piece]] -= 1
    queues.queue_of[piece] = -1
    unlink(queues.lists, piece)


@compiled
def enqueue(queues: Queues, group: int, piece: int, which: int) -> None:
    """Insert a piece, which must be in no queue, at the front of a queue."""
    queues.size[group, which] += 1
    queues.queue_of[piece] = which
    push(queues.lists, head_of(queues, group, which), piece)


@compiled
def drop_oldest(queues: Queues, group: int, which: int) -> None:
    """Remove the oldest piece of a nonempty queue."""
    dequeue(queues, group, queues.lists.before[head_of(queues, group, which)])


@compiled
def oldest_unpinned(queues: Queues, group: int, which: int, cache: CacheState) -> int:
    """Find the oldest unpinned piece of a queue; -1 if none."""
    return int(last_unpinned(queues.lists, head_of(queues, group, which), cache))
