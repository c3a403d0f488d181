"""FIFO: evict the piece that was brought in first, however often it was used since."""

from __future__ import annotations

from greenroom.core.policy import Policy, State, compiled
from greenroom.policies import lists
from greenroom.policies.lru import on_evict, on_insert, victim


@compiled
def on_hit(state: State, piece: int, now: int) -> None:
    pass


fifo = Policy("fifo", lists.memory, on_hit, on_insert, on_evict, victim)
