"""NEXT-USE: evict the expert whose next use is expected to lie farthest ahead. Greenroom's own.

OPT evicts the expert with the farthest next use. This policy estimates it for all experts of a
layer whenever that layer is served, as

    value = E[discount ** (T - 1)],   T = steps of this layer until the expert is used

which is 1 for an expert of the next token and falls towards 0. The estimate is an S-shaped function
of a sum of what is known at that moment:

  - links: which experts this token used, which the token before it, and which this token used one
    layer earlier. A set of n experts counts 1/sqrt(n) for each of them, and every pair (expert
    used, expert to come) has a weight: a Markov estimate, trained to predict instead of counted;
  - shares, as logarithms relative to the layer's mean: of the last few tokens, of this prompt, and
    of the past when the prompt began. The prompt's begins as that of the past.

All weights are learnt while it runs, from nothing, by temporal differences (Sutton, 1988): when the
layer is served again, an expert's value should have been 1 if it is used now, discount * (its new
value) if not; every weight moves along that error. So a horizon of many tokens is learnt one step
at a time, and the future is not needed.

The victim has the smallest value * exp(-distance * d / layers), where d layers pass until its layer
comes again: of two experts that wait for equally many tokens, the one just served goes first. The
experts of the step that is being served go last. Ties go to the lowest id.

How it was found, what it gains and what failed: docs/policies.md.
"""

from __future__ import annotations

from math import exp, log, sqrt
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

SHORT, LONG, PROMPT, CONSTANT = range(4)
FEATURES = 3
SAME, BEFORE, BELOW, NOW = range(4)  # sets: this token's, the one before's, the layer below's;
SETS = 3  # NOW is what becomes SAME when the old estimates have been learnt from
INITIAL = np.array([0.0, 0.0, 0.5, 0.0])  # a prompt's share is worth something from the start
LEAST = 0.02  # of the mean share: no logarithm is taken of less
GONE = np.inf


class Own(NamedTuple):
    """L layers, P pieces, E experts in the largest layer; [L, E] holds a number for each expert."""

    begin: Ints  # [L + 1] the first piece of each layer
    layer: Ints  # [P]
    one_group: bool  # all layers share a group
    seen: Ints  # [L] steps of the layer
    long: Floats  # [L, E] share of the steps so far in which it was used, decayed
    mean: Floats  # [L] of `long` over the layer's experts
    prompt_steps: Ints  # [L] steps of the layer in this prompt
    uses: Ints  # [L, E] in this prompt
    level: Floats  # [L] `mean` when the prompt began
    prior: Floats  # [L, E] uses, in units of `level`, that the prompt began with
    current: Floats  # [FEATURES, L, E]; PROMPT's is the logarithm of uses, not yet of a share
    features: Floats  # [FEATURES, L, E] what the estimates that stand were made from
    sets: Ints  # [SETS + 1, L, E] likewise: experts
    set_sizes: Ints  # [SETS + 1, L]
    links: Weights  # [SETS, L, E, E] from an expert of a set to each expert of the layer
    weights: Floats  # [L, FEATURES + 1] of the features, and the constant
    value: Floats  # [L, E] the estimates
    key: Floats  # [L, E] the value of a resident, infinite for others
    floor: Floats  # [L] no resident of the layer has a smaller key
    used: Floats  # [E] 1 where the step uses an expert; scratch
    error: Weights  # [E] scratch
    steps: Ints  # [1] so far
    last_step: Ints  # [L, E] in which it was used
    nearness: Floats  # [L + 1] exp(-distance * d / L)
    discount: float
    rate: float
    link_rate: float
    prior_tokens: float
    keep_short: float  # what a share keeps from step to step
    keep_long: float


def memory(setup: Setup) -> Own:
    layers = setup.layers
    begin = np.searchsorted(setup.layer, np.arange(layers + 1)).astype(np.int64)
    each = (layers, int(np.diff(begin).max()))
    given = setup.options
    return Own(
        begin=begin,
        layer=setup.layer.astype(np.int64),
        one_group=setup.groups == 1,
        seen=np.zeros(layers, np.int64),
        long=np.zeros(each),
        mean=np.zeros(layers),
        prompt_steps=np.zeros(layers, np.int64),
        uses=np.zeros(each, np.int64),
        level=np.zeros(layers),
        prior=np.zeros(each),
        current=np.zeros((FEATURES, *each)),
        features=np.zeros((FEATURES, *each)),
        sets=np.zeros((SETS + 1, *each), np.int64),
        set_sizes=np.zeros((SETS + 1, layers), np.int64),
        links=np.zeros((SETS, *each, each[1]), np.float32),
        weights=np.tile(INITIAL, (layers, 1)),
        value=np.zeros(each),
        key=np.full(each, GONE),
        floor=np.full(layers, GONE),
        used=np.zeros(each[1]),
        error=np.zeros(each[1], np.float32),
        steps=np.zeros(1, np.int64),
        last_step=np.zeros(each, np.int64),
        nearness=np.exp(-given["distance"] * np.arange(layers + 1) / layers),
        discount=given["discount"],
        rate=given["rate"],
        link_rate=given["link-rate"],
        prior_tokens=given["prior"],
        keep_short=0.5 ** (1 / given["short"]),
        keep_long=0.5 ** (1 / given["long"]),
    )


@compiled
def on_request(state: State, own: Own, now: Now) -> None:
    own.prompt_steps[:] = 0


@compiled
def on_step(state: State, own: Own, pieces: Ids, rows: Rows, weights: Weights, now: Now) -> None:
    if pieces.size == 0:
        return
    layer = now.layer
    experts = own.begin[layer + 1] - own.begin[layer]
    own.steps[0] += 1
    _observe(own, layer, experts, pieces)
    _estimate(own, layer, experts)
    _learn(own, layer, experts)
    _remember(own, layer, experts)
    own.seen[layer] += 1
    own.floor[layer] = GONE
    for i in range(experts):
        if own.key[layer, i] < GONE:
            own.key[layer, i] = own.value[layer, i]
            own.floor[layer] = min(own.floor[layer], own.value[layer, i])


@compiled
def _observe(own: Own, layer: int, experts: int, pieces: Ids) -> None:
    """Count the step. Only what is used needs a logarithm: other shares just decay."""
    share = pieces.size / experts
    if own.seen[layer] == 0:
        # Nothing is known: every expert is as likely as this step has experts.
        own.mean[layer] = share = min(share, 0.5)
        own.weights[layer, CONSTANT] = (2.0 * share - 1.0) / sqrt(share - share * share)
        for i in range(experts):
            own.long[layer, i] = share
    if own.prompt_steps[layer] == 0:
        _begin_prompt(own, layer, experts)
    own.prompt_steps[layer] += 1
    decay, least, gain = log(own.keep_short), log(LEAST), 1.0 - own.keep_long
    own.mean[layer] += gain * (share - own.mean[layer])
    for i in range(experts):
        own.used[i] = 0.0
        own.long[layer, i] *= own.keep_long
        own.current[SHORT, layer, i] = max(own.current[SHORT, layer, i] + decay, least)
    own.set_sizes[NOW, layer] = pieces.size
    for j in range(pieces.size):
        i = pieces[j] - own.begin[layer]
        own.sets[NOW, layer, j] = i
        own.used[i] = 1.0
        own.last_step[layer, i] = own.steps[0]
        own.uses[layer, i] += 1
        own.long[layer, i] += gain
        recent = exp(own.current[SHORT, layer, i]) + (1.0 - own.keep_short) / own.level[layer]
        own.current[SHORT, layer, i] = log(recent)
        uses = own.prior[layer, i] + own.uses[layer, i] / own.level[layer]
        own.current[PROMPT, layer, i] = log(uses)


@compiled
def _begin_prompt(own: Own, layer: int, experts: int) -> None:
    """The prompt's shares begin as those of the past."""
    own.level[layer] = own.mean[layer]
    for i in range(experts):
        relative = own.long[layer, i] / own.mean[layer] + LEAST
        own.uses[layer, i] = 0
        own.prior[layer, i] = own.prior_tokens * relative
        own.current[LONG, layer, i] = log(relative)
        own.current[PROMPT, layer, i] = log(own.prior[layer, i])


@compiled
def _estimate(own: Own, layer: int, experts: int) -> None:
    """Put the new values' scores into `error`."""
    total = log(own.prompt_steps[layer] + own.prior_tokens)
    constant = own.weights[layer, CONSTANT] - own.weights[layer, PROMPT] * total
    short, long, prompt = (
        own.weights[layer, SHORT],
        own.weights[layer, LONG],
        own.weights[layer, PROMPT],
    )
    for i in range(experts):
        own.error[i] = constant + (
            short * own.current[SHORT, layer, i]
            + long * own.current[LONG, layer, i]
            + prompt * own.current[PROMPT, layer, i]
        )
    lower = layer - 1 if layer > 0 else own.seen.size - 1
    _add_links(own, SAME, layer, experts, NOW, layer)
    _add_links(own, BEFORE, layer, experts, SAME, layer)
    _add_links(own, BELOW, layer, experts, SAME, lower)


@compiled
def _add_links(own: Own, kind: int, layer: int, experts: int, whose: int, where: int) -> None:
    """Add what a set announces to the scores."""
    size = own.set_sizes[whose, where]
    strength = np.float32(1.0 / sqrt(max(size, 1)))
    for j in range(size):
        expert = own.sets[whose, where, j]
        for i in range(experts):
            own.error[i] += strength * own.links[kind, layer, expert, i]


@compiled
def _learn(own: Own, layer: int, experts: int) -> None:
    """Turn scores into values and errors, and move the weights that made the old values."""
    by_short = by_long = by_prompt = by_constant = 0.0
    for i in range(experts):
        half = 0.5 * own.error[i]
        value = 0.5 + 0.5 * np.divide(half, sqrt(1.0 + half * half))
        wanted = own.used[i] + (1.0 - own.used[i]) * own.discount * value
        own.error[i] = wanted - own.value[layer, i]
        own.value[layer, i] = value
    for i in range(experts):
        by_short += own.error[i] * own.features[SHORT, layer, i]
        by_long += own.error[i] * own.features[LONG, layer, i]
        by_prompt += own.error[i] * own.features[PROMPT, layer, i]
        by_constant += own.error[i]
    if own.seen[layer] == 0:
        return  # there were no old values to learn from
    step = own.rate / experts
    own.weights[layer, SHORT] += step * by_short
    own.weights[layer, LONG] += step * by_long
    own.weights[layer, PROMPT] += step * by_prompt
    own.weights[layer, CONSTANT] += 4.0 * step * by_constant
    for kind in range(SETS):
        size = own.set_sizes[kind, layer]
        strength = np.float32(own.link_rate / sqrt(max(size, 1)))
        for j in range(size):
            expert = own.sets[kind, layer, j]
            for i in range(experts):
                own.links[kind, layer, expert, i] += strength * own.error[i]


@compiled
def _remember(own: Own, layer: int, experts: int) -> None:
    """Keep what the new estimates were made from, to learn from it next time."""
    total = log(own.prompt_steps[layer] + own.prior_tokens)
    for i in range(experts):
        own.features[SHORT, layer, i] = own.current[SHORT, layer, i]
        own.features[LONG, layer, i] = own.current[LONG, layer, i]
        own.features[PROMPT, layer, i] = own.current[PROMPT, layer, i] - total
    lower = layer - 1 if layer > 0 else own.seen.size - 1
    _copy_set(own, SAME, layer, BEFORE, layer)
    _copy_set(own, SAME, lower, BELOW, layer)
    _copy_set(own, NOW, layer, SAME, layer)


@compiled
def _copy_set(own: Own, whose: int, where: int, kind: int, layer: int) -> None:
    size = own.set_sizes[whose, where]
    own.set_sizes[kind, layer] = size
    for j in range(size):
        own.sets[kind, layer, j] = own.sets[whose, where, j]


@compiled
def on_insert(state: State, own: Own, piece: int, now: Now) -> None:
    layer = own.layer[piece]
    expert = piece - own.begin[layer]
    own.key[layer, expert] = own.value[layer, expert]
    own.floor[layer] = min(own.floor[layer], own.value[layer, expert])


@compiled
def on_evict(state: State, own: Own, piece: int, now: Now) -> None:
    layer = own.layer[piece]
    own.key[layer, piece - own.begin[layer]] = GONE


@compiled
def victim(state: State, own: Own, group: int, piece: int, now: Now) -> int:
    layers = own.floor.size
    first, bound = now.layer, GONE
    for layer in range(layers):
        lowest = own.floor[layer] * own.nearness[_ahead(layer, now.layer, layers)]
        if lowest < bound:
            first, bound = layer, lowest
    best, least = -1, GONE
    # The likeliest layer first; then most floors show that there is nothing smaller.
    for order in range(-1, layers):
        layer = order if order >= 0 else first
        nearness = own.nearness[_ahead(layer, now.layer, layers)]
        if own.floor[layer] * nearness > least or not (own.one_group or layer == group):
            continue
        begin, floor = own.begin[layer], GONE
        for i in range(own.begin[layer + 1] - begin):
            key = own.key[layer, i]
            floor = min(floor, key)
            key *= nearness
            if key <= least and key < GONE and state.pinned[begin + i] == 0:
                if own.last_step[layer, i] == own.steps[0]:
                    key += 1.0  # the step that is being served needs it
                if key < least or (key == least and begin + i < best):
                    best, least = begin + i, key
        own.floor[layer] = floor
    return best


@compiled
def _ahead(layer: int, now: int, layers: int) -> int:
    """Layers until this one comes again, 1 .. layers. (A remainder would be ten times slower.)"""
    return layer - now if layer > now else layer - now + layers


next_use = Policy(
    "next-use",
    memory,
    victim,
    on_insert=on_insert,
    on_evict=on_evict,
    on_step=on_step,
    on_request=on_request,
    options=(
        Option("discount", 0.85, "what a use is worth that is one token farther", 0.0, 0.99),
        Option("distance", 0.5, "how much a round of layers counts against an expert", 0.0, 9.0),
        Option("short", 3.0, "half-life in tokens of the share of the last few", 0.1),
        Option("long", 1000.0, "half-life in tokens of the share of the past", 0.1),
        Option("prior", 10.0, "tokens of its own that outweigh the past in a prompt", 0.1),
        Option("rate", 0.04, "learning rate of the shares' weights", 0.0, 1.0),
        Option("link-rate", 0.2, "learning rate of the links", 0.0, 1.0),
    ),
)
