"""LFU: evict the piece with the fewest requests.

`lfu` counts since the start, and counts survive eviction ("perfect LFU"); `lfu-in-cache` counts
since the piece was brought in. Ties go to the piece requested least recently.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import Now, Policy, Setup, State, compiled
from greenroom.policies.helpers import buckets
from greenroom.policies.helpers.buckets import Buckets


class Own(NamedTuple):
    buckets: Buckets  # key: requests
    count: Ints  # type: ignore[assignment]  # [P] requests
    age: Ints  # [G] of a group's last victim's key, where keys grow by it (LFUDA)


def memory(setup: Setup) -> Own:
    counts, ages = np.zeros(setup.pieces, np.int64), np.zeros(setup.groups, np.int64)
    return Own(buckets.empty(setup), counts, ages)


@compiled
def on_hit(state: State, own: Own, piece: int, now: Now) -> None:
    own.count[piece] += 1
    buckets.rise(own.buckets, state.group_of[piece], piece, own.count[piece])


@compiled
def on_insert(state: State, own: Own, piece: int, now: Now) -> None:
    own.count[piece] += 1
    buckets.place(own.buckets, state.group_of[piece], piece, own.count[piece])


@compiled
def on_evict(state: State, own: Own, piece: int, now: Now) -> None:
    buckets.drop(own.buckets, piece)


@compiled
def forget(state: State, own: Own, piece: int, now: Now) -> None:
    buckets.drop(own.buckets, piece)
    own.count[piece] = 0


@compiled
def victim(state: State, own: Own, group: int, piece: int, now: Now) -> int:
    return int(buckets.lowest(own.buckets, group, state))


lfu = Policy("lfu", memory, victim, on_hit, on_insert, on_evict)
lfu_in_cache = Policy("lfu-in-cache", memory, victim, on_hit, on_insert, forget)
