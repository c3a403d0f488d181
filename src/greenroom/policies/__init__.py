"""Eviction policies: one a file, and this table."""

from __future__ import annotations

from greenroom.core.policy import Policy
from greenroom.errors import UnknownName
from greenroom.policies.fifo import fifo
from greenroom.policies.lfu import lfu, lfu_in_cache
from greenroom.policies.lru import lru

POLICIES: dict[str, Policy] = {p.name: p for p in (lru, fifo, lfu, lfu_in_cache)}
DEFAULT = "lru"


def policy(name: str) -> Policy:
    """The policy of that name; `auto` is the default one.

    Options follow a colon: `moe-infinity:matching=request,capacity=50`. UnknownName lists the
    names of policies or options that there are.
    """
    base, colon, options = name.partition(":")
    try:
        found = POLICIES[DEFAULT if base == "auto" else base]
    except KeyError:
        raise UnknownName("policy", base, ["auto", *POLICIES]) from None
    return found.configured(options) if colon else found
