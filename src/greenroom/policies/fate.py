"""Fate's eviction policy, which favours experts of shallow layers.

The paper's abstract has no formula, so this one is Greenroom's reading. The victim is the expert
with the largest age * (1 + bias * l / L), where age is the number of steps (one layer of one pass
each) since its last request, l is its layer, counted from 0, and L is the number of layers. Of two
experts of equal age, the one of the shallower layer stays, since its layer leaves less time to
predict and prefetch. With `bias` 0, the policy is LRU by steps. Of equal experts, the victim is of
the deepest layer, and within a layer the one requested least recently.
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
