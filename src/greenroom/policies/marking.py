"""Marking, randomised (Fiat et al., 1991, "Competitive paging algorithms").

A requested piece is marked. The victim is any piece without a mark, each as likely as the others;
where none is left that may be evicted, a new phase begins: all marks are taken away first. `seed`
makes it repeatable.
"""

from __future__ import annotations

from greenroom.core.policy import Now, Policy, State, compiled
from greenroom.policies.helpers import pools
from greenroom.policies.helpers.pools import Pools


@compiled
def mark(state: State, own: Pools, piece: int, now: Now) -> None:
    """The pool holds what is resident and has no mark."""
    pools.take(own, state.group_of[piece], piece)


@compiled
def victim(state: State, own: Pools, group: int, piece: int, now: Now) -> int:
    chosen = pools.draw(own, group, state)
    if chosen < 0:
        for slot in range(state.first[group], state.first[group + 1]):
            resident = state.piece_in[slot]
            if resident >= 0 and own.at[resident] < 0:
                pools.add(own, group, resident)
        chosen = pools.draw(own, group, state)
    return int(chosen)


marking = Policy("marking", pools.empty, victim, mark, on_evict=mark)
