"""FIFO eviction policy: evict the expert that was inserted first, even if it is used often."""

from __future__ import annotations

from greenroom.core.policy import Policy
from greenroom.policies.helpers import lists
from greenroom.policies.lru import on_evict, on_insert, victim

fifo = Policy("fifo", lists.one_list_per_group, victim, on_insert=on_insert, on_evict=on_evict)
