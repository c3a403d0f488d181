"""Randomised marking, an eviction policy (Fiat et al., 1991, "Competitive paging algorithms").

A requested expert is marked. The victim is drawn from the experts without a mark, each with equal
probability. If none of them may be evicted, all marks are removed before the draw. The draws repeat
with the same `seed`.
"""

from __future__ import annotations

from greenroom.core.policy import CacheState, LogicalTime, Policy, compiled
from greenroom.policies.helpers import pools
from greenroom.policies.helpers.pools import Pools


@compiled
def mark(cache: CacheState, state: Pools, piece: int, now: LogicalTime) -> None:
    """Mark a cached expert by removing it from the pool of unmarked experts."""
    pools.discard(state, cache.group_of[piece], piece)


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
