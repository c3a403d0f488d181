"""The state of NEXT-USE, an array for each quantity (`policies/next_use.py` explains them)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import Floats, PolicySetup, Weights
from greenroom.policies.helpers import next_use_memory, next_use_network
from greenroom.policies.helpers.next_use_memory import Memory
from greenroom.policies.helpers.next_use_network import Network

SHORT, LONG, PROMPT, RECALLED, CONSTANT = range(5)
FEATURES = 4
# Sets of experts: of this token, of the token before, and of the layer below. CURRENT becomes SAME
# after the old estimates have been learned from.
SAME, BEFORE, BELOW, CURRENT = range(4)
SETS = 3
# The prompt's share and recalled values are worth something from the start.
INITIAL = np.array([0.0, 0.0, 0.5, 0.3, 0.0])
LEAST = 0.02  # of the mean share: smaller shares count as this in logarithms
NOT_RESIDENT = np.inf  # the key of an expert without a slot


class NextUseState(NamedTuple):
    """State arrays of the NEXT-USE eviction policy.

    L layers, P experts in all, E experts in the largest layer.
    """

    begin: Ints  # [L + 1] the first piece of each layer
    layer: Ints  # [P]
    one_group: bool  # all layers share a group
    layer_steps: Ints  # [L] steps of the layer
    long: Floats  # [L, E] share of the steps so far in which it was used, decayed
    mean: Floats  # [L] of `long` over the layer's experts
    prompt_steps: Ints  # [L] steps of the layer in this prompt
    uses: Ints  # [L, E] in this prompt
    level: Floats  # [L] `mean` when the prompt began
    prior: Floats  # [L, E] uses, in units of `level`, that the prompt began with
    current: Floats  # [FEATURES, L, E]; PROMPT's are logarithms of uses, not yet of shares
    features: Floats  # [FEATURES, L, E] of the present estimates
    sets: Ints  # [SETS + 1, L, E] experts of the present estimates
    set_sizes: Ints  # [SETS + 1, L]
    links: Weights  # [SETS, L, E, E] from an expert of a set to each expert of the layer
    weights: Floats  # [L, FEATURES + 1] of the features, and the constant
    value: Floats  # [L, E] the estimates
    corrected: Floats  # [L, E] the estimates with the network's correction, if there is one
    key: Floats  # [L, E] the corrected value of a resident, infinite for others
    floor: Floats  # [L] no resident of the layer has a smaller key
    used: Floats  # [E] 1 where the step uses an expert; scratch
    error: Weights  # [E] scratch
    memory: Memory
    network: Network
    steps: Ints  # [1] so far
    last_step: Ints  # [L, E] in which it was used
    nearness: Floats  # [L + 1] exp(-distance * d / L)
    discount: float
    rate: float
    link_rate: float
    prior_tokens: float
    decay_short: float  # of a share from step to step
    decay_long: float


def build_state(setup: PolicySetup) -> NextUseState:
    layers = setup.layers
    begin = np.searchsorted(setup.layer, np.arange(layers + 1)).astype(np.int64)
    each = (layers, int(np.diff(begin).max()))
    options = setup.options
    return NextUseState(
        begin=begin,
        layer=setup.layer.astype(np.int64),
        one_group=setup.groups == 1,
        layer_steps=np.zeros(layers, np.int64),
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
        corrected=np.zeros(each),
        key=np.full(each, NOT_RESIDENT),
        floor=np.full(layers, NOT_RESIDENT),
        used=np.zeros(each[1]),
        error=np.zeros(each[1], np.float32),
        memory=next_use_memory.empty(layers, each[1], options["memory"], options["discount"]),
        network=next_use_network.empty(layers, each[1]),
        steps=np.zeros(1, np.int64),
        last_step=np.zeros(each, np.int64),
        nearness=np.exp(-options["distance"] * np.arange(layers + 1) / layers),
        discount=options["discount"],
        rate=options["rate"],
        link_rate=options["link-rate"],
        prior_tokens=options["prior"],
        decay_short=0.5 ** (1 / options["short"]),
        decay_long=0.5 ** (1 / options["long"]),
    )
