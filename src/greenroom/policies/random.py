"""Random: evict any piece, each as likely as the others. `seed` makes it repeatable."""

from __future__ import annotations

from greenroom.core.policy import Now, Policy, State, compiled
from greenroom.policies.helpers import pools
from greenroom.policies.helpers.pools import Pools


@compiled
def on_insert(state: State, own: Pools, piece: int, now: Now) -> None:
    pools.add(own, state.group_of[piece], piece)


@compiled
def on_evict(state: State, own: Pools, piece: int, now: Now) -> None:
    pools.take(own, state.group_of[piece], piece)


@compiled
def victim(state: State, own: Pools, group: int, piece: int, now: Now) -> int:
    return int(pools.draw(own, group, state))


random = Policy("random", pools.empty, victim, on_insert=on_insert, on_evict=on_evict)
