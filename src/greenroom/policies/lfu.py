"""LFU eviction policy: evict the expert with the fewest requests.

`lfu` counts an expert's requests since the start, and counts survive eviction ("perfect LFU").
`lfu-in-cache` counts requests since the expert was inserted. Of equal experts, the one requested
least recently is evicted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import CacheState, LogicalTime, Policy, PolicySetup, compiled
from greenroom.policies.helpers import buckets
from greenroom.policies.helpers.buckets import Buckets


class LfuState(NamedTuple):
    """State arrays of the LFU and LFUDA eviction policies: P experts, G slot groups."""

    buckets: Buckets  # key: requests
    count: Ints  # type: ignore[assignment]  # [P] requests
    age: Ints  # [G] the key of the group's last victim, by which LFUDA's keys grow


def build_state(setup: PolicySetup) -> LfuState:
    counts, ages = np.zeros(setup.pieces, np.int64), np.zeros(setup.groups, np.int64)
    return LfuState(buckets.empty(setup), counts, ages)


@compiled
def on_hit(cache: CacheState, state: LfuState, piece: int, now: LogicalTime) -> None:
    state.count[piece] += 1
    buckets.rise(state.buckets, cache.group_of[piece], piece, state.count[piece])


@compiled
def on_insert(cache: CacheState, state: LfuState, piece: int, now: LogicalTime) -> None:
    state.count[piece] += 1
    buckets.place(state.buckets, cache.group_of[piece], piece, state.count[piece])


@compiled
def on_evict(cache: CacheState, state: LfuState, piece: int, now: LogicalTime) -> None:
    buckets.drop(state.buckets, piece)


@compiled
def on_evict_in_cache(cache: CacheState, state: LfuState, piece: int, now: LogicalTime) -> None:
    buckets.drop(state.buckets, piece)
    state.count[piece] = 0


@compiled
def victim(cache: CacheState, state: LfuState, group: int, piece: int, now: LogicalTime) -> int:
    return int(buckets.lowest_unpinned(state.buckets, group, cache))


lfu = Policy("lfu", build_state, victim, on_hit, on_insert, on_evict)
lfu_in_cache = Policy("lfu-in-cache", build_state, victim, on_hit, on_insert, on_evict_in_cache)
