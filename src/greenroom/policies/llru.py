"""LLRU eviction policy: LRU by rounds of layers (Angelopoulos et al., section 4, definition 2).

The paper is "Cache Management for Mixture-of-Experts LLMs". A round computes all L layers once, and
time counts layers. At time t, the victim has the largest R = floor((t - last) / L), the number of
rounds since its last request. Of these, it has the largest D = (last - t) mod L, the distance to
its layer, so that its layer comes latest; D is 0 for the layer being computed. In the paper a round
requests one expert of a layer, so R and D never tie. Here a step may request several. Of equals,
the one requested least recently is evicted.

D is computed from the layers: an expert can become resident while another layer is computed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import CacheState, LogicalTime, Policy, PolicySetup, compiled
from greenroom.policies.helpers import lists
from greenroom.policies.helpers.lists import Lists


class LayerLruState(NamedTuple):
    """State arrays of the LLRU eviction policy, for P experts and G slot groups."""

    lists: Lists  # one a layer, the oldest piece at the back: D is equal, R grows with age
    layer: Ints  # [P]
    last: Ints  # [P] clock of the last request
    begin: Ints  # [G + 1] group g has the layers begin[g] .. begin[g + 1] - 1


def build_state(setup: PolicySetup) -> LayerLruState:
    begin = [0, setup.layers] if setup.groups == 1 else range(setup.layers + 1)
    return LayerLruState(
        lists.empty(setup.pieces, setup.layers),
        setup.layer,
        np.zeros(setup.pieces, np.int64),
        np.array(begin, np.int64),
    )


@compiled
def on_insert(cache: CacheState, state: LayerLruState, piece: int, now: LogicalTime) -> None:
    state.last[piece] = now.clock
    lists.push(state.lists, state.last.size + state.layer[piece], piece)


@compiled
def on_hit(cache: CacheState, state: LayerLruState, piece: int, now: LogicalTime) -> None:
    lists.unlink(state.lists, piece)
    on_insert(cache, state, piece, now)


@compiled
def on_evict(cache: CacheState, state: LayerLruState, piece: int, now: LogicalTime) -> None:
    lists.unlink(state.lists, piece)


@compiled
def victim(
    cache: CacheState, state: LayerLruState, group: int, piece: int, now: LogicalTime
) -> int:
    layers = state.begin[-1]
    best, most = -1, -1
    for layer in range(state.begin[group], state.begin[group + 1]):
        oldest = lists.last_unpinned(state.lists, state.last.size + layer, cache)
        if oldest >= 0:
            rounds = (now.clock - state.last[oldest]) // layers
            # R first, then D; different layers differ in D.
            rank = rounds * layers + (layer - now.layer) % layers
            if rank > most:
                best, most = oldest, rank
    return int(best)


llru = Policy("llru", build_state, victim, on_hit, on_insert, on_evict)
