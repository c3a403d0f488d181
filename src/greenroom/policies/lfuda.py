"""LFUDA eviction policy: least frequently used with dynamic aging (Arlitt et al., 2000).

The paper is "Evaluating content management techniques for Web proxy caches". Each resident has the
key K = C + A: C is its requests since its insertion, A the age of its group at its last request.
The smallest K is evicted and becomes the age. Ties go to the piece requested least recently.
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
