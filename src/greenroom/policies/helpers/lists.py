"""Circular doubly linked lists in two flat arrays, for queue-like eviction policies.

Nodes 0 .. P - 1 are experts, and node P + i is the head of list i. An expert is in one list at
most.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import CacheState, PolicySetup, compiled


class Lists(NamedTuple):
    """Arrays of N circular doubly linked lists of P experts.

    The node after a list's head is the front of the list, and the node before the head is the back.
    """

    before: Ints  # [P + N]
    after: Ints  # [P + N]


def empty(pieces: int, lists: int) -> Lists:
    """Create `lists` empty linked lists for `pieces` experts: every node points at itself."""
    return Lists(*(np.arange(pieces + lists, dtype=np.int64) for _ in range(2)))


def one_list_per_group(setup: PolicySetup) -> Lists:
    """Create an empty linked list of cached experts for each slot group."""
    return empty(setup.pieces, setup.groups)


@compiled
def unlink(lists: Lists, piece: int) -> None:
    """Remove an expert from its linked list."""
    before, after = lists.before[piece], lists.after[piece]
    lists.after[before] = after
    lists.before[after] = before


@compiled
def push(lists: Lists, head: int, piece: int) -> None:
    """Insert an expert at the front of the linked list with this head."""
    first = lists.after[head]
    lists.before[piece], lists.after[piece] = head, first
    lists.after[head] = piece
    lists.before[first] = piece


@compiled
def last_unpinned(lists: Lists, head: int, cache: CacheState) -> int:
    """Find the unpinned expert nearest to the back of a linked list; -1 if none."""
    piece = lists.before[head]
    while piece != head:
        if cache.pinned[piece] == 0:
            return int(piece)
        piece = lists.before[piece]
    return -1


QUEUES = 4  # of a group, at most


class Queues(NamedTuple):
    """Queues of experts with their sizes, up to 4 for each of G slot groups.

    The newest expert is in front. A queue has cached experts, or evicted ones that a policy
    remembers (ghosts).
    """

    lists: Lists
    queue_of: Ints  # [P] the queue of a piece, or -1
    size: Ints  # [G, QUEUES]


def empty_queues(pieces: int, groups: int) -> Queues:
    """Create empty queues of `pieces` experts for each of `groups` groups."""
    return Queues(
        empty(pieces, QUEUES * groups),
        np.full(pieces, -1, np.int64),
        np.zeros((groups, QUEUES), np.int64),
    )


@compiled
def head_of(queues: Queues, group: int, which: int) -> int:
    """Return the list node that is the head of a slot group's queue of experts."""
    return int(queues.queue_of.size + QUEUES * group + which)


@compiled
def dequeue(queues: Queues, group: int, piece: int) -> None:
    """Remove an expert from its queue."""
    queues.size[group, queues.queue_of[piece]] -= 1
    queues.queue_of[piece] = -1
    unlink(queues.lists, piece)


@compiled
def enqueue(queues: Queues, group: int, piece: int, which: int) -> None:
    """Insert an expert, which must be in no queue, at the front of a queue."""
    queues.size[group, which] += 1
    queues.queue_of[piece] = which
    push(queues.lists, head_of(queues, group, which), piece)


@compiled
def drop_oldest(queues: Queues, group: int, which: int) -> None:
    """Remove the oldest expert of a queue that is not empty."""
    dequeue(queues, group, queues.lists.before[head_of(queues, group, which)])


@compiled
def oldest_unpinned(queues: Queues, group: int, which: int, cache: CacheState) -> int:
    """Find the oldest unpinned expert of a queue; -1 if none."""
    return int(last_unpinned(queues.lists, head_of(queues, group, which), cache))
