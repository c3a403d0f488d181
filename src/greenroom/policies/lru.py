"""LRU: evict the piece requested least recently (Sleator and Tarjan, 1985)."""

from __future__ import annotations

from greenroom.core.policy import Now, Policy, State, compiled
from greenroom.policies.helpers import lists
from greenroom.policies.helpers.lists import Lists


@compiled
def on_hit(state: State, own: Lists, piece: int, now: Now) -> None:
    lists.unlink(own, piece)
    lists.push(own, state.slot_of.size + state.group_of[piece], piece)


@compiled
def on_insert(state: State, own: Lists, piece: int, now: Now) -> None:
    lists.push(own, state.slot_of.size + state.group_of[piece], piece)


@compiled
def on_evict(state: State, own: Lists, piece: int, now: Now) -> None:
    lists.unlink(own, piece)


@compiled
def victim(state: State, own: Lists, group: int, piece: int, now: Now) -> int:
    return int(lists.last(own, state.slot_of.size + group, state))


lru = Policy("lru", lists.one_a_group, victim, on_hit, on_insert, on_evict)
