"""Table of the expert cache's eviction policies, each in its own module.

The cache has slots for experts, in groups: one group for each layer, or one for all layers. A miss
in a full group evicts an expert of the group, the victim, which the policy chooses. Code calls
what a slot holds a piece: an expert, or the top segment of a split expert. A pinned piece must not
be evicted now, for example because it is being computed.

docs/policies.md says how to add a policy. The names are also in config/tables.py, for commands that
must not wait for Numba.
"""

from __future__ import annotations

from pathlib import Path

from greenroom.core.policy import Policy
from greenroom.errors import UnknownName
from greenroom.policies.arc import arc
from greenroom.policies.fate import fate
from greenroom.policies.fifo import fifo
from greenroom.policies.helpers.policy_file import SUFFIX, load_policy
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
    """Return the named eviction policy for a cache of `capacity` slots.

    `auto` is LRU if every one of the `experts` has a slot, else the default policy.
    """
    return policy(WITH_ROOM if name == "auto" and capacity >= experts else name)


def policy(name: str) -> Policy:
    """Return the named eviction policy; `auto` is the default policy, next-use.

    A name that ends in `.py` is the path of a file that defines a `policy`. Options follow a colon:
    `moe-infinity:matching=request,capacity=50`. Raises UnknownName, which lists the valid names,
    for an unknown policy or option, and UsageError for a wrong value or file.
    """
    base, colon, options = name.partition(":")
    if base.endswith(SUFFIX):
        loaded = load_policy(Path(base))
        return loaded.with_options(options) if colon else loaded
    try:
        chosen = POLICIES[DEFAULT if base == "auto" else base]
    except KeyError:
        raise UnknownName("policy", base, ["auto", *POLICIES]) from None
    return chosen.with_options(options) if colon else chosen
