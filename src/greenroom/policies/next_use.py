"""NEXT-USE, Greenroom's eviction policy: evict the expert with the farthest expected next use.

The optimal policy OPT evicts the expert whose next use is farthest in the future. This policy
estimates the next use of all experts of a layer whenever the layer is computed, as

    value = E[discount ** (T - 1)],   T = steps of this layer until the expert is used

where E is the expected value. The value is 1 for an expert that the next token uses, and falls
towards 0 for a later use. The estimate is an S-shaped function of a sum of three kinds of terms:

  - Links from three sets of experts: those that this token used, those that the token before it
    used, and those that this token used one layer earlier. Every pair of a used expert and an
    expert to come has a learned weight, which counts 1/sqrt(n) in a set of n experts.
  - Shares of the steps in which the expert was used, as logarithms relative to the layer's mean:
    in the last few tokens, in this prompt, and in the past when the prompt began. A prompt's share
    begins as the share of the past.
  - A recalled value: what followed those of the last passes whose routing was most like that of the
    present pass (helpers/next_use_memory.py). The term is its difference from the value that the
    prompt's share gives.

All weights are learned at run time by temporal differences (Sutton, 1988). At a layer's next step,
the value of an expert should have been 1 if the expert is used now, and discount * (its new value)
otherwise. Every weight moves along that error. So a horizon of many tokens is learned one step at a
time, and the future is not needed.

`greenroom train-policy` trains a network on earlier requests (helpers/next_use_network.py). Where
there is one, it corrects the values by which victims are chosen; what is learned at run time does
not depend on it.

The victim has the smallest value * exp(-distance * d / layers), where d is the number of layers
until its layer is computed again. Of two experts with equal values, the one whose layer was just
computed is evicted first. The experts of the current step are evicted last, and of equal experts
the one with the lowest id is evicted.

docs/policies.md has the policy's derivation and results, and what failed.
"""

from __future__ import annotations

from math import exp, log, sqrt

import numpy as np

from greenroom.core.policy import (
    CacheState,
    Ids,
    Learning,
    LogicalTime,
    Policy,
    PolicyOption,
    Rows,
    Weights,
    compiled,
)
from greenroom.policies.helpers import next_use_learned, next_use_memory, next_use_network
from greenroom.policies.helpers.next_use_state import (
    BEFORE,
    BELOW,
    CONSTANT,
    CURRENT,
    FEATURES,
    LEAST,
    LONG,
    NOT_RESIDENT,
    PROMPT,
    RECALLED,
    SAME,
    SETS,
    SHORT,
    NextUseState,
    build_state,
)


@compiled
def on_request(cache: CacheState, state: NextUseState, now: LogicalTime) -> None:
    state.prompt_steps[:] = 0
    next_use_network.begin_request(state.network)


@compiled
def on_step(
    cache: CacheState,
    state: NextUseState,
    pieces: Ids,
    rows: Rows,
    weights: Weights,
    now: LogicalTime,
) -> None:
    if pieces.size == 0:
        return
    layer = now.layer
    experts = state.begin[layer + 1] - state.begin[layer]
    state.steps[0] += 1
    _observe(state, layer, experts, pieces)
    next_use_memory.observe(state.memory, layer, pieces, state.begin[layer])
    _recall(state, layer, experts)
    _estimate(state, layer, experts)
    _learn(state, layer, experts)
    _store_features(state, layer, experts)
    _correct(state, layer, experts, pieces)
    state.layer_steps[layer] += 1
    state.floor[layer] = NOT_RESIDENT
    for i in range(experts):
        if state.key[layer, i] < NOT_RESIDENT:
            state.key[layer, i] = state.corrected[layer, i]
            state.floor[layer] = min(state.floor[layer], state.corrected[layer, i])


@compiled
def _observe(state: NextUseState, layer: int, experts: int, pieces: Ids) -> None:
    """Count a step's experts in the layer's shares of use.

    Only used experts need a new logarithm, since the shares of others just decay.
    """
    share = pieces.size / experts
    if state.layer_steps[layer] == 0:
        # The first step: every expert has the step's share of experts as its probability.
        state.mean[layer] = share = min(share, 0.5)
        state.weights[layer, CONSTANT] = (2.0 * share - 1.0) / sqrt(share - share * share)
        for i in range(experts):
            state.long[layer, i] = share
    if state.prompt_steps[layer] == 0:
        _begin_prompt(state, layer, experts)
    state.prompt_steps[layer] += 1
    decay, least, gain = log(state.decay_short), log(LEAST), 1.0 - state.decay_long
    state.mean[layer] += gain * (share - state.mean[layer])
    for i in range(experts):
        state.used[i] = 0.0
        state.long[layer, i] *= state.decay_long
        state.current[SHORT, layer, i] = max(state.current[SHORT, layer, i] + decay, least)
    state.set_sizes[CURRENT, layer] = pieces.size
    for j in range(pieces.size):
        i = pieces[j] - state.begin[layer]
        state.sets[CURRENT, layer, j] = i
        state.used[i] = 1.0
        state.last_step[layer, i] = state.steps[0]
        state.uses[layer, i] += 1
        state.long[layer, i] += gain
        recent = (
            exp(state.current[SHORT, layer, i]) + (1.0 - state.decay_short) / state.level[layer]
        )
        state.current[SHORT, layer, i] = log(recent)
        uses = state.prior[layer, i] + state.uses[layer, i] / state.level[layer]
        state.current[PROMPT, layer, i] = log(uses)


@compiled
def _begin_prompt(state: NextUseState, layer: int, experts: int) -> None:
    """Begin a prompt, starting from the experts' shares of use in the past."""
    state.level[layer] = state.mean[layer]
    for i in range(experts):
        relative = state.long[layer, i] / state.mean[layer] + LEAST
        state.uses[layer, i] = 0
        state.prior[layer, i] = state.prior_tokens * relative
        state.current[LONG, layer, i] = log(relative)
        state.current[PROMPT, layer, i] = log(state.prior[layer, i])


@compiled
def _recall(state: NextUseState, layer: int, experts: int) -> None:
    """Look up what followed passes like the present one."""
    total = state.prompt_steps[layer] + state.prior_tokens
    for i in range(experts):
        uses = state.prior[layer, i] * state.level[layer] + state.uses[layer, i]
        state.memory.share[i] = np.divide(uses, total)
    next_use_memory.recall(state.memory, layer, experts)
    for i in range(experts):
        state.current[RECALLED, layer, i] = state.memory.term[i]


@compiled
def _estimate(state: NextUseState, layer: int, experts: int) -> None:
    """Write the sums of terms, from which new values are computed, to `state.error`."""
    total = log(state.prompt_steps[layer] + state.prior_tokens)
    constant = state.weights[layer, CONSTANT] - state.weights[layer, PROMPT] * total
    short, long = state.weights[layer, SHORT], state.weights[layer, LONG]
    prompt, recalled = state.weights[layer, PROMPT], state.weights[layer, RECALLED]
    for i in range(experts):
        state.error[i] = constant + (
            short * state.current[SHORT, layer, i]
            + long * state.current[LONG, layer, i]
            + prompt * state.current[PROMPT, layer, i]
            + recalled * state.current[RECALLED, layer, i]
        )
    lower = layer - 1 if layer > 0 else state.layer_steps.size - 1
    _add_links(state, SAME, layer, experts, CURRENT, layer)
    _add_links(state, BEFORE, layer, experts, SAME, layer)
    _add_links(state, BELOW, layer, experts, SAME, lower)


@compiled
def _add_links(
    state: NextUseState, kind: int, layer: int, experts: int, source: int, source_layer: int
) -> None:
    """Add the weights of links from a set of experts to the sums in `state.error`."""
    size = state.set_sizes[source, source_layer]
    strength = np.float32(1.0 / sqrt(max(size, 1)))
    for j in range(size):
        expert = state.sets[source, source_layer, j]
        for i in range(experts):
            state.error[i] += strength * state.links[kind, layer, expert, i]


@compiled
def _learn(state: NextUseState, layer: int, experts: int) -> None:
    """Compute new values and the old values' errors, and move all weights by the errors."""
    for i in range(experts):
        half = 0.5 * state.error[i]
        value = 0.5 + 0.5 * np.divide(half, sqrt(1.0 + half * half))
        target = state.used[i] + (1.0 - state.used[i]) * state.discount * value
        state.error[i] = target - state.value[layer, i]
        state.value[layer, i] = value
    if state.layer_steps[layer] == 0:
        return  # there were no old values to learn from
    step, total = state.rate / experts, 0.0
    for feature in range(FEATURES):
        slope = 0.0
        for i in range(experts):
            slope += state.error[i] * state.features[feature, layer, i]
        state.weights[layer, feature] += step * slope
    for i in range(experts):
        total += state.error[i]
    state.weights[layer, CONSTANT] += 4.0 * step * total
    for kind in range(SETS):
        size = state.set_sizes[kind, layer]
        strength = np.float32(state.link_rate / sqrt(max(size, 1)))
        for j in range(size):
            expert = state.sets[kind, layer, j]
            for i in range(experts):
                state.links[kind, layer, expert, i] += strength * state.error[i]


@compiled
def _store_features(state: NextUseState, layer: int, experts: int) -> None:
    """Store the features of the newest next-use estimates, to learn from them later."""
    total = log(state.prompt_steps[layer] + state.prior_tokens)
    for i in range(experts):
        state.features[SHORT, layer, i] = state.current[SHORT, layer, i]
        state.features[LONG, layer, i] = state.current[LONG, layer, i]
        state.features[PROMPT, layer, i] = state.current[PROMPT, layer, i] - total
        state.features[RECALLED, layer, i] = state.current[RECALLED, layer, i]
    lower = layer - 1 if layer > 0 else state.layer_steps.size - 1
    _copy_set(state, SAME, layer, BEFORE, layer)
    _copy_set(state, SAME, lower, BELOW, layer)
    _copy_set(state, CURRENT, layer, SAME, layer)


@compiled
def _copy_set(state: NextUseState, source: int, source_layer: int, kind: int, layer: int) -> None:
    size = state.set_sizes[source, source_layer]
    state.set_sizes[kind, layer] = size
    for j in range(size):
        state.sets[kind, layer, j] = state.sets[source, source_layer, j]


@compiled
def _correct(state: NextUseState, layer: int, experts: int, pieces: Ids) -> None:
    """Let the network, if there is one, correct the newest estimates for the choice of victims."""
    if state.network.trained[0] == 0:
        for i in range(experts):
            state.corrected[layer, i] = state.value[layer, i]
        return
    next_use_network.observe(state.network, layer, pieces, state.begin[layer])
    next_use_network.correct(
        state.network, layer, experts, state.value[layer], state.features[:, layer]
    )
    for i in range(experts):
        half = 0.5 * state.network.sums[i]
        state.corrected[layer, i] = 0.5 + 0.5 * np.divide(half, sqrt(1.0 + half * half))


@compiled
def on_insert(cache: CacheState, state: NextUseState, piece: int, now: LogicalTime) -> None:
    layer = state.layer[piece]
    expert = piece - state.begin[layer]
    state.key[layer, expert] = state.corrected[layer, expert]
    state.floor[layer] = min(state.floor[layer], state.corrected[layer, expert])


@compiled
def on_evict(cache: CacheState, state: NextUseState, piece: int, now: LogicalTime) -> None:
    layer = state.layer[piece]
    state.key[layer, piece - state.begin[layer]] = NOT_RESIDENT


@compiled
def victim(cache: CacheState, state: NextUseState, group: int, piece: int, now: LogicalTime) -> int:
    layers = state.floor.size
    first, bound = now.layer, NOT_RESIDENT
    for layer in range(layers):
        lowest = state.floor[layer] * state.nearness[_ahead(layer, now.layer, layers)]
        if lowest < bound:
            first, bound = layer, lowest
    best, least = -1, NOT_RESIDENT
    # The most promising layer first: then the floors of most others rule them out.
    for order in range(-1, layers):
        layer = order if order >= 0 else first
        nearness = state.nearness[_ahead(layer, now.layer, layers)]
        if state.floor[layer] * nearness > least or not (state.one_group or layer == group):
            continue
        begin, floor = state.begin[layer], NOT_RESIDENT
        for i in range(state.begin[layer + 1] - begin):
            key = state.key[layer, i]
            floor = min(floor, key)
            key *= nearness
            if key <= least and key < NOT_RESIDENT and cache.pinned[begin + i] == 0:
                if state.last_step[layer, i] == state.steps[0]:
                    key += 1.0  # the current step needs it
                if key < least or (key == least and begin + i < best):
                    best, least = begin + i, key
        state.floor[layer] = floor
    return best


@compiled
def _ahead(layer: int, now: int, layers: int) -> int:
    """Return the number of layers until `layer` is computed again, from 1 to `layers`."""
    # A remainder would be ten times slower.
    return layer - now if layer > now else layer - now + layers


next_use = Policy(
    "next-use",
    build_state,
    victim,
    on_insert=on_insert,
    on_evict=on_evict,
    on_step=on_step,
    on_request=on_request,
    options=(
        PolicyOption("discount", 0.85, "value of a use one token later", 0.0, 0.99),
        PolicyOption(
            "distance", 0.5, "how much a round of layers counts against an expert", 0.0, 9.0
        ),
        PolicyOption("short", 3.0, "half-life in tokens of the share of the last few", 0.1),
        PolicyOption("long", 1000.0, "half-life in tokens of the share of the past", 0.1),
        PolicyOption("prior", 10.0, "tokens of a prompt that weigh as much as the past", 0.1),
        PolicyOption("rate", 0.04, "learning rate of the shares' weights", 0.0, 1.0),
        PolicyOption("link-rate", 0.2, "learning rate of the links", 0.0, 1.0),
        PolicyOption("memory", 1024, "passes in which the present one is looked up", 2, 65536),
    ),
    learning=Learning(2, next_use_learned.export, next_use_learned.restore),
)
