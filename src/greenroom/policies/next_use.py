"""NEXT-USE: evict the expert whose next use is expected to lie farthest ahead. Ours; see
docs/policies.md for how it was found and what it gains.

OPT evicts the expert with the farthest next use. This policy estimates it, for every expert of a
layer each time that layer was served, as

    value = E[discount ** (T - 1)],   T = steps at this layer until the expert is used

which is 1 for an expert of the next token and falls towards 0. The estimate is a logistic function
of what is known when the layer was served:

  - links: which experts were used by this token, by the one before it, and by this token one layer
    earlier. Each set of n experts is a vector with 1/sqrt(n) at its members (so its length is 1),
    and every pair (expert used, expert to come) has a weight: a token-to-token Markov estimate that
    is trained to predict instead of counted;
  - shares, as logarithms relative to the layer's mean: of the last few tokens, of this prompt, and
    of the last few hundred tokens. The prompt's begins as the long-run share and becomes its own.

Everything is learnt while it runs, from nothing, by temporal differences (Sutton, 1988): when the
layer is served again, the value of an expert should have been 1 if it is used now, and
discount * (its new value) if not; every weight moves along that error. So a horizon of many tokens
is learnt one step at a time, and nothing needs the future.

The victim has the smallest value * exp(-distance * d / layers), where d layers pass until its layer
comes again: of two experts that wait equally many tokens, the one just served goes first.
"""

from __future__ import annotations

from math import exp, log
from typing import NamedTuple

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import (
    Floats,
    Ids,
    Now,
    Option,
    Policy,
    Rows,
    Setup,
    State,
    Weights,
    compiled,
)

SHORT, LONG, PROMPT, BIAS = range(4)  # weights of a layer; the first three are features
FEATURES = 3
SAME, BEFORE, BELOW = range(3)  # sets: of this step, of the layer's last, of the layer below
SETS = 3
FLOOR = 0.02  # of the mean share: no logarithm is taken of less
GONE = np.inf


class Own(NamedTuple):
    """L layers, P pieces, E experts in the largest layer. `begin[l] + e` is a piece."""

    begin: Ints  # [L + 1]
    layer: Ints  # [P]
    one_group: bool  # all layers share a group
    seen: Ints  # [L] steps of the layer
    shares: Floats  # [2, P] of the steps in which a piece was used, SHORT and LONG
    prompt: Ints  # [P] uses in this prompt
    prompt_steps: Ints  # [L] steps in this prompt
    features: Floats  # [FEATURES, P] of the estimates that stand
    sets: Ints  # [SETS, L, E] pieces: what the estimates that stand were made from
    set_sizes: Ints  # [SETS, L]
    links: Floats  # [SETS, P, E] from a piece to the experts of the layer that is estimated
    weights: Floats  # [L, FEATURES + 1]
    value: Floats  # [P] the estimates
    key: Floats  # [P] the value of a resident, infinite for others
    floor: Floats  # [L] no resident of the layer has a smaller key
    used: Floats  # [E] 1 where the step uses an expert: scratch
    error: Floats  # [E] scratch
    now: Ints  # [1] the serial number of the step
    served: Ints  # [P] the last step that used a piece
    keep: Floats  # [2] what a share keeps in a step, SHORT and LONG
    discount: float
    rate: float
    link_rate: float
    prior: float
    nearness: Floats  # [L + 1] exp(-distance * d / L)


def memory(setup: Setup) -> Own:
    layers, pieces = setup.layers, setup.pieces
    begin = np.searchsorted(setup.layer, np.arange(layers + 1)).astype(np.int64)
    widest = int(np.diff(begin).max())
    o = setup.options
    return Own(
        begin=begin,
        layer=setup.layer.astype(np.int64),
        one_group=setup.groups == 1,
        seen=np.zeros(layers, np.int64),
        shares=np.zeros((2, pieces)),
        prompt=np.zeros(pieces, np.int64),
        prompt_steps=np.zeros(layers, np.int64),
        features=np.zeros((FEATURES, pieces)),
        sets=np.zeros((SETS, layers, widest), np.int64),
        set_sizes=np.zeros((SETS, layers), np.int64),
        links=np.zeros((SETS, pieces, widest)),
        weights=np.zeros((layers, FEATURES + 1)),
        value=np.zeros(pieces),
        key=np.full(pieces, GONE),
        floor=np.full(layers, GONE),
        used=np.zeros(widest),
        error=np.zeros(widest),
        now=np.zeros(1, np.int64),
        served=np.full(pieces, -1, np.int64),
        keep=np.exp2(-1.0 / np.array([o["short"], o["long"]])),
        discount=o["discount"],
        rate=o["rate"],
        link_rate=o["link-rate"],
        prior=o["prior"],
        nearness=np.exp(-o["distance"] * np.arange(layers + 1) / layers),
    )


@compiled
def on_request(state: State, own: Own, now: Now) -> None:
    own.prompt[:] = 0
    own.prompt_steps[:] = 0


@compiled
def on_step(state: State, own: Own, pieces: Ids, rows: Rows, weights: Weights, now: Now) -> None:
    layer = now.layer
    begin = own.begin[layer]
    experts = own.begin[layer + 1] - begin
    own.now[0] += 1
    own.used[:] = 0.0
    for piece in pieces:
        own.used[piece - begin] = 1.0
        own.prompt[piece] += 1
        own.served[piece] = own.now[0]
    own.prompt_steps[layer] += 1
    if own.seen[layer] == 0:
        # Nothing is known: every expert is as likely as this step has experts.
        share = min(pieces.size / experts, 0.5)
        own.weights[layer, BIAS] = log(share / (1.0 - share))
        own.weights[layer, PROMPT] = 0.5
        own.shares[:, begin : begin + experts] = share
    for i in range(experts):
        for h in range(2):
            share = own.shares[h, begin + i]
            own.shares[h, begin + i] = share + (1.0 - own.keep[h]) * (own.used[i] - share)
    _learn(own, layer, begin, experts, pieces)
    own.seen[layer] += 1
    own.floor[layer] = GONE
    for piece in range(begin, begin + experts):
        if state.slot_of[piece] >= 0:
            own.key[piece] = own.value[piece]
            own.floor[layer] = min(own.floor[layer], own.value[piece])


@compiled
def _learn(own: Own, layer: int, begin: int, experts: int, pieces: Ids) -> None:
    """Make the layer's estimates anew, and move the weights of the old ones along their error."""
    weights, error, features = own.weights[layer], own.error, own.features
    mean = 0.0
    for piece in range(begin, begin + experts):
        mean += own.shares[LONG, piece]
    mean /= experts
    # The new estimates need the new sets, the error's gradient the old ones: keep `sets` for now.
    below = layer - 1 if layer > 0 else own.begin.size - 2
    error[:] = 0.0
    _add_links(own, SAME, pieces, begin, experts)
    _add_links(own, BEFORE, own.sets[SAME, layer, : own.set_sizes[SAME, layer]], begin, experts)
    if below != layer:
        _add_links(own, BELOW, own.sets[SAME, below, : own.set_sizes[SAME, below]], begin, experts)
    slope0 = slope1 = slope2 = slope3 = 0.0
    known = own.seen[layer] > 0
    scale = 1.0 / (own.prompt_steps[layer] + own.prior)
    for i in range(experts):
        piece = begin + i
        long = own.shares[LONG, piece] / mean + FLOOR
        short = log(own.shares[SHORT, piece] / mean + FLOOR)
        prompt = log((own.prompt[piece] / mean + own.prior * long) * scale)
        long = log(long)
        score = (
            error[i]
            + weights[BIAS]
            + weights[SHORT] * short
            + weights[LONG] * long
            + weights[PROMPT] * prompt
        )
        value = 1.0 / (1.0 + exp(-score))
        # What the value should have been, less what it was.
        miss = own.used[i] + (1.0 - own.used[i]) * own.discount * value - own.value[piece]
        slope0 += miss * features[SHORT, piece]
        slope1 += miss * features[LONG, piece]
        slope2 += miss * features[PROMPT, piece]
        slope3 += miss
        error[i] = miss
        own.value[piece] = value
        features[SHORT, piece] = short
        features[LONG, piece] = long
        features[PROMPT, piece] = prompt
    if known:
        step = own.rate / experts
        weights[SHORT] += step * slope0
        weights[LONG] += step * slope1
        weights[PROMPT] += step * slope2
        weights[BIAS] += 4.0 * step * slope3
        for kind in range(SETS):
            _move_links(own, kind, own.sets[kind, layer, : own.set_sizes[kind, layer]], experts)
    _keep_set(own, BEFORE, layer, own.sets[SAME, layer, : own.set_sizes[SAME, layer]])
    _keep_set(own, SAME, layer, pieces)
    if below != layer:
        _keep_set(own, BELOW, layer, own.sets[SAME, below, : own.set_sizes[SAME, below]])


@compiled
def _add_links(own: Own, kind: int, pieces: Ids, begin: int, experts: int) -> None:
    """Add to `error` what a set says of each expert of the layer."""
    if pieces.size:
        strength = 1.0 / np.sqrt(pieces.size)
        for piece in pieces:
            for i in range(experts):
                own.error[i] += strength * own.links[kind, piece, i]


@compiled
def _move_links(own: Own, kind: int, pieces: Ids, experts: int) -> None:
    """Move what a set says of each expert of the layer along `error`."""
    if pieces.size:
        step = own.link_rate / np.sqrt(pieces.size)
        for piece in pieces:
            for i in range(experts):
                own.links[kind, piece, i] += step * own.error[i]


@compiled
def _keep_set(own: Own, kind: int, layer: int, pieces: Ids) -> None:
    own.set_sizes[kind, layer] = pieces.size
    for i in range(pieces.size):
        own.sets[kind, layer, i] = pieces[i]


@compiled
def on_insert(state: State, own: Own, piece: int, now: Now) -> None:
    own.key[piece] = own.value[piece]
    layer = own.layer[piece]
    own.floor[layer] = min(own.floor[layer], own.value[piece])


@compiled
def on_evict(state: State, own: Own, piece: int, now: Now) -> None:
    own.key[piece] = GONE


@compiled
def victim(state: State, own: Own, group: int, piece: int, now: Now) -> int:
    layers = own.floor.size
    best, least = -1, GONE
    for layer in range(layers):
        if not own.one_group and layer != group:
            continue
        ahead = (layer - now.layer - 1) % layers + 1
        nearness = own.nearness[ahead]
        if own.floor[layer] * nearness >= least:
            continue
        floor = GONE
        for p in range(own.begin[layer], own.begin[layer + 1]):
            key = own.key[p]
            floor = min(floor, key)
            if key == GONE or state.pinned[p] > 0:
                continue
            key *= nearness
            if own.served[p] == own.now[0]:
                key += 1.0  # the step being served needs it: after all others
            if key < least:
                best, least = p, key
        own.floor[layer] = floor
    return best


next_use = Policy(
    "next-use",
    memory,
    victim,
    on_insert=on_insert,
    on_evict=on_evict,
    on_step=on_step,
    on_request=on_request,
    options=(
        Option("discount", 0.8, "a next use one token farther is worth this much of it", 0.0, 0.99),
        Option("distance", 0.5, "how much a round of layers counts against an expert", 0.0),
        Option("short", 3.0, "half-life in tokens of the share of the last few", 0.1),
        Option("long", 1000.0, "half-life in tokens of the long-run share", 0.1),
        Option(
            "prior", 10.0, "tokens after which a prompt's own share outweighs the long-run", 0.1
        ),
        Option("rate", 0.02, "learning rate of the shares' weights", 0.0),
        Option("link-rate", 0.2, "learning rate of the links", 0.0),
    ),
)
