"""Export and restore what the NEXT-USE policy has learned, for later runs.

`state` is a `NextUseState` (policies/next_use.py). What concerns only the current prompt is left
out: the shares of this prompt and of the last few tokens, and the sets of experts that links start
from.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from greenroom.core.policy import Arrays
from greenroom.policies.helpers import next_use_memory, next_use_network
from greenroom.policies.helpers.learned import array_of

MOST_LINKS = 48 << 20  # bytes; larger links are not stored (60 layers of 256 experts are smaller)


def export(state: Any) -> Arrays:
    """Export what NEXT-USE has learned: shares, weights, links, estimates, passes, network."""
    names = ["layer_steps", "long", "mean", "weights", "value"]
    if state.links.nbytes <= MOST_LINKS:
        names.append("links")
    arrays = {name: getattr(state, name).copy() for name in names}
    network = next_use_network.export(state.network)
    return {**arrays, "passes": next_use_memory.export(state.memory), **network}


def restore(state: Any, arrays: Arrays) -> None:
    """Restore what NEXT-USE has learned; the next step begins a prompt.

    ValueError if the arrays do not fit the model.
    """
    # A layer's first step moves its constant weight by the error of the last run's estimates, and
    # no other weight.
    each = state.long.shape
    checked = {
        "layer_steps": array_of(arrays, "layer_steps", each[:1], np.int64, 0),
        "long": array_of(arrays, "long", each, np.float64, 0, 1),
        "mean": array_of(arrays, "mean", each[:1], np.float64, 0, 1),
        "weights": array_of(arrays, "weights", state.weights.shape, np.float64),
        "value": array_of(arrays, "value", each, np.float64, 0, 1),
    }
    sets = state.memory.sets
    passes = array_of(arrays, "passes", (None, *sets.shape[:2]), np.uint64)
    next_use_memory.check(state.memory, passes, np.diff(state.begin))
    network = next_use_network.check(state.network, arrays)
    if "links" in arrays:
        checked["links"] = array_of(arrays, "links", state.links.shape, np.float32)
    if (checked["mean"][checked["layer_steps"] > 0] == 0).any():
        raise ValueError("the array mean has no share for a layer that has been computed")
    for unlearned in (state.links, state.prompt_steps, state.current, state.features):
        unlearned[:] = 0
    state.set_sizes[:] = 0
    for name, array in checked.items():
        getattr(state, name)[...] = array
    next_use_memory.restore(state.memory, passes)
    next_use_network.restore(state.network, network)
    state.corrected[...] = state.value
    resident = state.key < np.inf
    state.key[resident] = state.value[resident]
    state.floor[:] = state.key.min(axis=1)
