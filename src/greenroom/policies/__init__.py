"""Eviction policies: one a file, and this table."""

from __future__ import annotations

from greenroom.core.policy import Policy
from greenroom.errors import UnknownName
from greenroom.policies.fifo import fifo
from greenroom.policies.lfu import lfu
from greenroom.policies.lru import lru

POLICIES: dict[str, Policy] = {p.name: p for p in (lru, fifo, lfu)}
DEFAULT = "lru"


def policy(name: str) -> Policy:
    """The policy of that name; `auto` is the default one. UnknownName lists the names."""
    try:
        return POLICIES[DEFAULT if name == "auto" else name]
    except KeyError:
        raise UnknownName("policy", name, ["auto", *POLICIES]) from None
