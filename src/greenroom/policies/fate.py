"""Fate's eviction policy: ARC in each layer, with shares of the pool that favour shallow layers.

Fate's abstract says that its cache favours shallow layers, and public summaries of the paper (arXiv
2502.12224) say that it evicts by ARC: the layers whose experts are hardest to predict get more
slots. Neither has the rule for the shares, so this rule is Greenroom's reading.

Of a pool of S slots for L layers, layer l (from 0) has a share in proportion to
1 + bias * (1 - l / L), in whole slots: the running sum of the shares is rounded down. A missing
expert counts for its own layer. The layer that is furthest above its share gives a slot; of equal
ones, the deepest layer does. Within that layer, ARC with the layer's share as its size (see
greenroom.policies.arc) chooses the victim. So a miss evicts an expert of its own layer, unless
another layer has more than its share. With `bias` 0, all shares are equal. With slots for each
layer (`--scope per-layer`), the policy is ARC.
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
from greenroom.policies.arc import T1, T2, adapt, demote, insert, oldest, promote
from greenroom.policies.helpers import lists
from greenroom.policies.helpers.lists import Queues


class FateState(NamedTuple):
    """State arrays of the Fate eviction policy: the ARC queues and the share of each layer.

    P experts, G slot groups, L layers.
    """

    queues: Queues  # of each layer: ARC's T1, T2, B1 and B2
    target: Floats  # [L] ARC's p
    layer: Ints  # [P]
    begin: Ints  # [G + 1] group g has the layers begin[g] .. begin[g + 1] - 1
    bound: Floats  # [L + 1] sum of the shares of all shallower layers, of all layers 1


def build_state(setup: PolicySetup) -> FateState:
    layers = setup.layers
    weight = 1 + setup.options["bias"] * (1 - np.arange(layers) / layers)
    begin = [0, layers] if setup.groups == 1 else range(layers + 1)
    return FateState(
        lists.empty_queues(setup.pieces, layers),
        np.zeros(layers),
        setup.layer.astype(np.int64),
        np.array(begin, np.int64),
        np.concatenate([[0], np.cumsum(weight)]) / weight.sum(),
    )


@compiled
def share(cache: CacheState, state: FateState, group: int, layer: int) -> int:
    """Compute how many slots of its slot group are a layer's share."""
    slots = cache.first[group + 1] - cache.first[group]
    first, end = state.bound[state.begin[group]], state.bound[state.begin[group + 1]]
    below = int(slots * ((state.bound[layer] - first) / (end - first)) + 1e-9)
    return int(slots * ((state.bound[layer + 1] - first) / (end - first)) + 1e-9) - below


@compiled
def on_hit(cache: CacheState, state: FateState, piece: int, now: LogicalTime) -> None:
    promote(state.queues, state.layer[piece], piece)


@compiled
def on_insert(cache: CacheState, state: FateState, piece: int, now: LogicalTime) -> None:
    layer = state.layer[piece]
    insert(state.queues, layer, piece, share(cache, state, cache.group_of[piece], layer))


@compiled
def on_evict(cache: CacheState, state: FateState, piece: int, now: LogicalTime) -> None:
    demote(state.queues, state.layer[piece], piece)


@compiled
def victim(cache: CacheState, state: FateState, group: int, piece: int, now: LogicalTime) -> int:
    queues, needs, needed = state.queues, -1, -1
    if piece >= 0:
        needs, needed = state.layer[piece], queues.queue_of[piece]
        adapt(queues, state.target, needs, needed, share(cache, state, group, needs))
    best, most = -1, -cache.piece_in.size - 1
    for layer in range(state.begin[group], state.begin[group + 1]):
        slots = share(cache, state, group, layer)
        surplus = queues.size[layer, T1] + queues.size[layer, T2] - slots
        ghost = -1
        if layer == needs:
            surplus, ghost = surplus + 1, needed
        if surplus >= most:
            chosen = oldest(queues, state.target, layer, ghost, slots, cache)
            if chosen >= 0:
                best, most = chosen, surplus
    return int(best)


fate = Policy(
    "fate",
    build_state,
    victim,
    on_hit,
    on_insert,
    on_evict,
    options=(PolicyOption("bias", 1.0, "how much larger the shares of shallow layers are", 0),),
)
