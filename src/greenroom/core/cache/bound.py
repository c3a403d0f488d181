"""A policy's functions in the cache's: compiled once for all settings of the policy."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from greenroom.core.cache import serving
from greenroom.core.compiling.compile_cache import jit, with_parts
from greenroom.core.policy import Policy, compiled


class Bound(NamedTuple):
    """A policy's functions in the cache's, each compiled when it is first called."""

    miss: Any  # (state, own, piece, now) -> (slot | BYPASS | STUCK, evicted piece or -1)
    serve: Any  # one step, from Python
    evict: Any
    evict_victim: Any
    borrow: Any
    admit: Any


PARTS = ("victim", "on_hit", "on_insert", "on_evict", "on_step", "on_request")


def bind(policy: Policy) -> Bound:
    """The cache's functions for a policy; compiled once for all its settings."""
    return _bind(*(getattr(policy, part) for part in PARTS), policy.preload is not None)


@cache
def _bind(*parts: Any) -> Bound:
    own = dict(zip((*PARTS, "bypass"), parts, strict=True))
    own["miss"] = compiled(with_parts(serving.miss, own))
    own["evict"] = jit(with_parts(serving.evict, own), _nrt=False)
    others = (serving.serve, serving.evict_victim, serving.borrow, serving.admit)
    serve, evict_victim, borrow, admit = (jit(with_parts(f, own), _nrt=False) for f in others)
    return Bound(own["miss"], serve, own["evict"], evict_victim, borrow, admit)
