"""Random eviction policy: evict any expert, each with equal probability.

The draws repeat with the same `seed`.
"""

from __future__ import annotations

from greenroom.core.policy import CacheState, LogicalTime, Policy, compiled
from greenroom.policies.helpers import pools
from greenroom.policies.helpers.pools import Pools


@compiled
def on_insert(cache: CacheState, state: Pools, piece: int, now: LogicalTime) -> None:
    pools.add(state, cache.group_of[piece], piece)


@compiled
def on_evict(cache: CacheState, state: Pools, piece: int, now: LogicalTime) -> None:
    pools.discard(state, cache.group_of[piece], piece)


@compiled
def victim(cache: CacheState, state: Pools, group: int, piece: int, now: LogicalTime) -> int:
    return int(pools.draw(state, group, cache))


random = Policy("random", pools.empty, victim, on_insert=on_insert, on_evict=on_evict)
