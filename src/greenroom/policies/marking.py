"""Marking, randomised (Fiat et al., 1991, "Competitive paging algorithms").

A requested piece is marked. The victim is any piece without a mark, each as likely as the others;
where none is left that may be evicted, a new phase begins: all marks are taken away first. `seed`
makes it repeatable.
"""

from __future__ import annotations

from greenroom.core.policy import CacheState, LogicalTime, Policy, compiled
from greenroom.policies.helpers import pools
from greenroom.policies.helpers.pools import Pools


@compiled
def mark(cache: CacheState, state: Pools, piece: int, now: LogicalTime) -> None:
    """The pool holds what is resident and has no mark."""
    pools.take(state, cache.group_of[piece], piece)


@compiled
def victim(cache: CacheState, state: Pools, group: int, piece: int, now: LogicalTime) -> int:
    chosen = pools.draw(state, group, cache)
    if chosen < 0:
        for slot in range(cache.first[group], cache.first[group + 1]):
            resident = cache.piece_in[slot]
            if resident >= 0 and state.at[resident] < 0:
                pools.add(state, group, resident)
        chosen = pools.draw(state, group, cache)
    return int(chosen)


marking = Policy("marking", pools.empty, victim, mark, on_evict=mark)
