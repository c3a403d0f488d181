"""LRU eviction policy: evict the expert requested least recently (Sleator and Tarjan, 1985)."""

from __future__ import annotations

from greenroom.core.policy import CacheState, LogicalTime, Policy, compiled
from greenroom.policies.helpers import lists
from greenroom.policies.helpers.lists import Lists


@compiled
def on_hit(cache: CacheState, state: Lists, piece: int, now: LogicalTime) -> None:
    lists.unlink(state, piece)
    lists.push(state, cache.slot_of.size + cache.group_of[piece], piece)


@compiled
def on_insert(cache: CacheState, state: Lists, piece: int, now: LogicalTime) -> None:
    lists.push(state, cache.slot_of.size + cache.group_of[piece], piece)


@compiled
def on_evict(cache: CacheState, state: Lists, piece: int, now: LogicalTime) -> None:
    lists.unlink(state, piece)


@compiled
def victim(cache: CacheState, state: Lists, group: int, piece: int, now: LogicalTime) -> int:
    return int(lists.last_unpinned(state, cache.slot_of.size + group, cache))


lru = Policy("lru", lists.one_list_per_group, victim, on_hit, on_insert, on_evict)
