"""Scopes: which layers share slots, and how many each of them has.

`shared` is one pool for all layers, `per-layer` ("-Dist") as many slots for each; a tuple of
numbers, one a layer, shares the slots out in proportion to them, and exactly where they add up to
all slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from greenroom.config import SCOPES
from greenroom.errors import BudgetError, UnknownName, UsageError

Scope: TypeAlias = str | tuple[float, ...]


def check_scope(scope: Scope, layers: int) -> None:
    """UnknownName or UsageError unless a model of so many layers can have this scope."""
    if isinstance(scope, str):
        if scope not in SCOPES:
            raise UnknownName("scope", scope, SCOPES)
    elif len(scope) != layers:
        raise UsageError(f"the scope has {len(scope)} numbers, the model has {layers} layers")
    elif min(scope) <= 0:
        raise UsageError(f"the numbers of a scope must be above 0: {min(scope):g}")


def name_of(scope: Scope) -> str:
    """How a result names it."""
    return scope if isinstance(scope, str) else "given"


def split_capacity(
    capacity: int, layers: int, scope: Scope, most: Sequence[int] | None = None
) -> list[int]:
    """Slots of each group: one group for all layers, or one a layer.

    `per-layer` gives capacity // layers each, and one more to the first capacity % layers. Of a
    tuple each layer has one slot at least, and no more than `most` of it, its experts.
    """
    check_scope(scope, layers)
    if capacity < 1:
        raise BudgetError(f"a cache needs at least one slot: {capacity}")
    if scope == "shared":
        return [capacity]
    if capacity < layers:
        raise BudgetError(
            f"scope {name_of(scope)} needs a slot for each of {layers} layers: {capacity}"
        )
    if scope == "per-layer":
        return [capacity // layers + (i < capacity % layers) for i in range(layers)]
    assert not isinstance(scope, str)
    return proportional(capacity, scope, most or [capacity] * layers)


def proportional(capacity: int, shares: Sequence[float], most: Sequence[int]) -> list[int]:
    """Whole numbers from 1 to `most` that add up to `capacity`, by the largest remainders; all of
    `most` where that is less."""
    top = np.asarray(most, np.float64)
    least, wanted = np.minimum(1.0, top), np.asarray(shares, np.float64)
    if top.sum() <= capacity:
        return list(most)
    low, high = 0.0, float(np.max(top / wanted)) + 1.0
    for _ in range(100):  # what one share is worth, to a float's precision
        worth = (low + high) / 2
        if np.clip(wanted * worth, least, top).sum() > capacity:
            high = worth
        else:
            low = worth
    exact = np.clip(wanted * low, least, top)
    found = np.floor(exact + 1e-6)
    order = np.lexsort((np.arange(top.size), found - exact))
    more = [i for i in order.tolist() if found[i] < top[i]]
    for i in more[: capacity - int(found.sum())]:
        found[i] += 1
    return [int(n) for n in found]
