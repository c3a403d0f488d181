"""Fate's eviction policy, which favours shallow layers. Our reading: its abstract has no formula.

Evict the piece with the largest age * (1 + bias * l / L), where age is the steps since its last
request and l its layer from 0. Of two pieces of equal age the shallower one stays: its layer leaves
less time to predict and prefetch. `bias` 0 is LRU by steps. Ties go to the deepest layer, and
within a layer to the piece requested least recently.
"""

from __future__ import annotations

import numpy as np

from greenroom.core.policy import (
    CacheState,
    LogicalTime,
    Policy,
    PolicyOption,
    PolicySetup,
    compiled,
)
from greenroom.policies.helpers import lists
from greenroom.policies.llru import LayerLruState, on_evict, on_hit, on_insert
from greenroom.policies.llru import build_state as unweighted


def build_state(setup: PolicySetup) -> LayerLruState:
    weight = 1 + setup.options["bias"] * np.arange(setup.layers) / setup.layers
    return unweighted(setup)._replace(weight=weight)


@compiled
def victim(
    cache: CacheState, state: LayerLruState, group: int, piece: int, now: LogicalTime
) -> int:
    best, most = -1, -1.0
    for layer in range(state.begin[group], state.begin[group + 1]):
        oldest = lists.last_unpinned(state.lists, state.last.size + layer, cache)
        if oldest >= 0:
            age = (now.clock - state.last[oldest]) * state.weight[layer]
            if age >= most:
                best, most = oldest, age
    return int(best)


fate = Policy(
    "fate",
    build_state,
    victim,
    on_hit,
    on_insert,
    on_evict,
    options=(PolicyOption("bias", 1.0, "how much more the age of deep layers counts", 0),),
)
