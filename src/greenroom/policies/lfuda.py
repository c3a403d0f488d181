"""LFUDA eviction policy: least frequently used with dynamic aging (Arlitt et al., 2000).

The paper is "Evaluating content management techniques for Web proxy caches". Each cached expert has
the key K = C + A. C is the number of its requests since its insertion, and A is the age of its slot
group at its last request. The expert with the smallest K is evicted, and its K becomes the group's
age. Of equal experts, the one requested least recently is evicted.
"""

from __future__ import annotations

from greenroom.core.policy import CacheState, LogicalTime, Policy, compiled
from greenroom.policies.helpers import buckets
from greenroom.policies.lfu import LfuState, build_state, on_evict
from greenroom.policies.lfu import victim as least_used


@compiled
def on_hit(cache: CacheState, state: LfuState, piece: int, now: LogicalTime) -> None:
    state.count[piece] += 1
    group = cache.group_of[piece]
    key = state.count[piece] + state.age[group]
    if key >= state.buckets.key[state.buckets.bucket_of[piece]]:
        buckets.rise(state.buckets, group, piece, key)
    else:  # the age fell: a victim with a smaller key, pinned until then, came after a larger one
        buckets.drop(state.buckets, piece)
        buckets.place(state.buckets, group, piece, key)


@compiled
def on_insert(cache: CacheState, state: LfuState, piece: int, now: LogicalTime) -> None:
    state.count[piece] = 1
    group = cache.group_of[piece]
    buckets.place(state.buckets, group, piece, 1 + state.age[group])


@compiled
def victim(cache: CacheState, state: LfuState, group: int, piece: int, now: LogicalTime) -> int:
    chosen = least_used(cache, state, group, piece, now)
    if chosen >= 0:
        state.age[group] = state.buckets.key[state.buckets.bucket_of[chosen]]
    return int(chosen)


lfuda = Policy("lfuda", build_state, victim, on_hit, on_insert, on_evict)
