"""Table of cache eviction policies, each in its own module.

How to add one: docs/policies.md.

The names are also in config/tables.py, for commands that must not wait for Numba.
"""

from __future__ import annotations

from greenroom.core.policy import Policy
from greenroom.errors import UnknownName
from greenroom.policies.arc import arc
from greenroom.policies.fate import fate
from greenroom.policies.fifo import fifo
from greenroom.policies.hobbit import hobbit
from greenroom.policies.hybrimoe import hybrimoe
from greenroom.policies.lcp import lcp
from greenroom.policies.lfu import lfu, lfu_in_cache
from greenroom.policies.lfuda import lfuda
from greenroom.policies.llru import llru
from greenroom.policies.lru import lru
from greenroom.policies.marking import marking
from greenroom.policies.moe_infinity import moe_infinity
from greenroom.policies.next_use import next_use
from greenroom.policies.opt import opt
from greenroom.policies.random import random
from greenroom.policies.s3fifo import s3fifo
from greenroom.policies.sieve import sieve
from greenroom.policies.static import static

POLICIES: dict[str, Policy] = {
    p.name: p
    for p in (
        *(lru, fifo, lfu, lfu_in_cache, random, marking, opt),
        *(llru, lcp, moe_infinity, static),
        *(s3fifo, sieve, arc, lfuda),
        *(hobbit, hybrimoe, fate),
        next_use,
    )
}
DEFAULT = "next-use"  # the best on held-out requests: docs/policies.md
WITH_ROOM = "lru"  # where every expert has a slot


def choose(name: str, capacity: int, experts: int) -> Policy:
    """Return the named eviction policy; `auto` is LRU if every expert has a slot."""
    return policy(WITH_ROOM if name == "auto" and capacity >= experts else name)


def policy(name: str) -> Policy:
    """Return the named eviction policy; `auto` is the default policy.

    Options follow a colon: `moe-infinity:matching=request,capacity=50`. UnknownName lists the
    valid names of policies or options.
    """
    base, colon, options = name.partition(":")
    try:
        chosen = POLICIES[DEFAULT if base == "auto" else base]
    except KeyError:
        raise UnknownName("policy", base, ["auto", *POLICIES]) from None
    return chosen.with_options(options) if colon else chosen
