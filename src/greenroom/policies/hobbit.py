"""HOBBIT's multidimensional cache, in our reading: its abstract names the idea and no formula.

Evict the piece with the smallest
    recency * last / t + frequency * count / t + distance * (1 - ((l - l_now) mod L) / L)
where t is the tokens of the prompt so far, `last` the one that last requested the piece, `count`
its requests in this prompt ("sequence-level"), and the last term how soon its layer l comes. The
three words are the options, weights of the dimensions. (Its fourth dimension, requests in high
precision, is `count` where misses may be served low: a policy hears of exact requests alone.) Ties
go to the piece requested least recently.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import Floats, Now, Option, Policy, Setup, State, compiled


class Own(NamedTuple):
    layer: Ints  # [P]
    count: Ints  # type: ignore[assignment]  # [P] requests in this prompt
    last: Ints  # [P] token of the prompt that last requested the piece, from 1; 0: none
    index: Ints  # type: ignore[assignment]  # [P] index of the last request
    begin: Ints  # [1] the prompt's first token
    near: Floats  # [L] distance * (1 - d / L) for d = 0 .. L - 1
    weight: Floats  # recency, frequency


def memory(setup: Setup) -> Own:
    none = np.zeros(setup.pieces, np.int64)
    weights, layers = setup.options, setup.layers
    return Own(
        setup.layer,
        none,
        none.copy(),
        none.copy(),
        np.zeros(1, np.int64),
        weights["distance"] * (1 - np.arange(layers) / layers),
        np.array([weights["recency"], weights["frequency"]], np.float64),
    )


@compiled
def on_request(state: State, own: Own, now: Now) -> None:
    own.count[:] = 0
    own.last[:] = 0
    own.begin[0] = now.token


@compiled
def on_use(state: State, own: Own, piece: int, now: Now) -> None:
    own.count[piece] += 1
    own.last[piece] = now.token - own.begin[0] + 1
    own.index[piece] = now.index


@compiled
def victim(state: State, own: Own, group: int, piece: int, now: Now) -> int:
    tokens = now.token - own.begin[0] + 1
    best, least = -1, np.inf
    for slot in range(state.first[group], state.first[group + 1]):
        resident = state.piece_in[slot]
        if resident < 0 or state.pinned[resident] > 0:
            continue
        ahead = own.layer[resident] - now.layer
        if ahead < 0:
            ahead += own.near.size
        score = own.weight[0] * own.last[resident] / tokens
        score += own.weight[1] * own.count[resident] / tokens
        score += own.near[ahead]
        if score < least or (score == least and own.index[resident] < own.index[best]):
            best, least = resident, score
    return int(best)


hobbit = Policy(
    "hobbit",
    memory,
    victim,
    on_use,
    on_use,
    on_request=on_request,
    options=(
        Option("recency", 1.0, "weight of the last request's time", 0),
        Option("frequency", 1.0, "weight of the requests in this prompt", 0),
        Option("distance", 0.1, "weight of how soon the layer comes", 0),
    ),
)
