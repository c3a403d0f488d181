"""HOBBIT's eviction policy (section 3.4, equation 3): recency, frequency and distance of layers.

The abstract has no formula; equation 3 is the paper's (Tang et al., 2024, arXiv 2411.01433). The
victim is the expert with the smallest
    recency * last / t + frequency * count / t + distance * (1 - ((l - l_now) mod L) / L)
where t is the number of tokens of the prompt so far, `last` is the token that last requested the
expert, and `count` is the number of its requests in this prompt ("sequence-level"). l is the
expert's layer, l_now is the layer being computed, and L is the number of layers: the last term is
larger if the expert's layer comes sooner.

The paper has two counts: F of all uses and H of the uses in high precision. A policy observes exact
requests only, so `count` is H, and without approximation also F: `frequency` is the sum of the two
weights. The paper finds the weights on a calibration set and does not give them; the defaults of
`recency`, `frequency` and `distance` are Greenroom's. Of equal experts, the victim is the one
requested least recently.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import (
    CacheState,
    Floats,
    LogicalTime,
    Policy,
    PolicyOption,
    PolicySetup,
    compiled,
)


class HobbitState(NamedTuple):
    """State arrays of the HOBBIT eviction policy, for P experts and L layers."""

    layer: Ints  # [P]
    count: Ints  # type: ignore[assignment]  # [P] requests in this prompt
    last: Ints  # [P] token of the prompt that last requested the piece, from 1; 0: none
    index: Ints  # type: ignore[assignment]  # [P] index of the last request
    begin: Ints  # [1] the prompt's first token
    near: Floats  # [L] distance * (1 - d / L) for d = 0 .. L - 1
    weight: Floats  # recency, frequency


def build_state(setup: PolicySetup) -> HobbitState:
    none = np.zeros(setup.pieces, np.int64)
    weights, layers = setup.options, setup.layers
    return HobbitState(
        setup.layer,
        none,
        none.copy(),
        none.copy(),
        np.zeros(1, np.int64),
        weights["distance"] * (1 - np.arange(layers) / layers),
        np.array([weights["recency"], weights["frequency"]], np.float64),
    )


@compiled
def on_request(cache: CacheState, state: HobbitState, now: LogicalTime) -> None:
    state.count[:] = 0
    state.last[:] = 0
    state.begin[0] = now.token


@compiled
def on_use(cache: CacheState, state: HobbitState, piece: int, now: LogicalTime) -> None:
    state.count[piece] += 1
    state.last[piece] = now.token - state.begin[0] + 1
    state.index[piece] = now.index


@compiled
def victim(cache: CacheState, state: HobbitState, group: int, piece: int, now: LogicalTime) -> int:
    tokens = now.token - state.begin[0] + 1
    best, least = -1, np.inf
    for slot in range(cache.first[group], cache.first[group + 1]):
        resident = cache.piece_in[slot]
        if resident < 0 or cache.pinned[resident] > 0:
            continue
        ahead = state.layer[resident] - now.layer
        if ahead < 0:
            ahead += state.near.size
        score = state.weight[0] * state.last[resident] / tokens
        score += state.weight[1] * state.count[resident] / tokens
        score += state.near[ahead]
        if score < least or (score == least and state.index[resident] < state.index[best]):
            best, least = resident, score
    return int(best)


hobbit = Policy(
    "hobbit",
    build_state,
    victim,
    on_use,
    on_use,
    on_request=on_request,
    options=(
        PolicyOption("recency", 1.0, "weight of the last request's time", 0),
        PolicyOption("frequency", 1.0, "weight of the requests in this prompt", 0),
        PolicyOption("distance", 0.1, "weight of how soon the layer comes", 0),
    ),
)
