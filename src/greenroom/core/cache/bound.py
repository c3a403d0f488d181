"""The cache's functions, compiled together with an eviction policy's functions."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from greenroom.core.cache import serving
from greenroom.core.compiling.compile_cache import jit, with_parts
from greenroom.core.compiling.steady_call import SteadyCall
from greenroom.core.policy import Policy, compiled


class Bound(NamedTuple):
    """The cache's compiled functions, which call an eviction policy's compiled functions."""

    miss: Any  # (state, policy_state, piece, now) -> (slot | BYPASS | STUCK, evicted piece or -1)
    serve: Any  # one step, from Python
    load: Any
    evict: Any
    evict_victim: Any
    borrow: Any
    admit: Any


PARTS = ("victim", "on_hit", "on_insert", "on_evict", "on_step", "on_request")


def bind(policy: Policy) -> Bound:
    """Compile the cache's functions with an eviction policy's functions in them.

    Two settings of one policy share the compiled code.
    """
    return _bind(*(getattr(policy, part) for part in PARTS), policy.preload is not None)


def bind_steadily(policy: Policy) -> Bound:
    """Compile the functions of one cache, whose arrays keep their types, as `SteadyCall`s."""
    bound = bind(policy)
    return Bound(bound.miss, *map(SteadyCall, bound[1:]))


@cache
def _bind(*parts: Any) -> Bound:
    names = dict(zip((*PARTS, "bypass"), parts, strict=True))
    names["miss"] = compiled(with_parts(serving.miss, names))
    names["evict"] = jit(with_parts(serving.evict, names), _nrt=False)
    serve = names["serve"] = jit(with_parts(serving.serve, names), _nrt=False)
    others = serving.load, serving.evict_victim, serving.borrow, serving.admit
    calls = (jit(with_parts(f, names), _nrt=False) for f in others)
    return Bound(names["miss"], serve, next(calls), names["evict"], *calls)
