"""LFUDA: least frequently used with dynamic aging (Arlitt et al., 2000, "Evaluating content
management techniques for Web proxy caches").

Each resident has the key K = C + A: C its requests since it was brought in, A the age of its group
when it was last requested. The smallest K is evicted and becomes the age. Ties go to the piece
requested least recently.
"""

from __future__ import annotations

from greenroom.core.policy import Now, Policy, State, compiled
from greenroom.policies.helpers import buckets
from greenroom.policies.lfu import Own, memory, on_evict
from greenroom.policies.lfu import victim as least_used


@compiled
def on_hit(state: State, own: Own, piece: int, now: Now) -> None:
    own.count[piece] += 1
    group = state.group_of[piece]
    key = own.count[piece] + own.age[group]
    if key >= own.buckets.key[own.buckets.bucket_of[piece]]:
        buckets.rise(own.buckets, group, piece, key)
    else:  # the age has fallen: a pinned piece of a smaller key was evicted after a larger one
        buckets.drop(own.buckets, piece)
        buckets.place(own.buckets, group, piece, key)


@compiled
def on_insert(state: State, own: Own, piece: int, now: Now) -> None:
    own.count[piece] = 1
    group = state.group_of[piece]
    buckets.place(own.buckets, group, piece, 1 + own.age[group])


@compiled
def victim(state: State, own: Own, group: int, piece: int, now: Now) -> int:
    chosen = least_used(state, own, group, piece, now)
    if chosen >= 0:
        own.age[group] = own.buckets.key[own.buckets.bucket_of[chosen]]
    return int(chosen)


lfuda = Policy("lfuda", memory, victim, on_hit, on_insert, on_evict)
