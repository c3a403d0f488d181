"""LRU: evict the piece requested least recently (Sleator and Tarjan, 1985)."""

from __future__ import annotations

from greenroom.core.policy import Policy, State, compiled
from greenroom.policies import lists


@compiled
def on_hit(state: State, piece: int, now: int) -> None:
    lists.unlink(state, piece)
    lists.push(state, piece)


@compiled
def on_insert(state: State, piece: int, now: int) -> None:
    lists.push(state, piece)


@compiled
def on_evict(state: State, piece: int, now: int) -> None:
    lists.unlink(state, piece)


@compiled
def victim(state: State, group: int, now: int) -> int:
    return int(lists.last(state, group))


lru = Policy("lru", lists.memory, on_hit, on_insert, on_evict, victim)
