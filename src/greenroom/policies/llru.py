"""LLRU: LRU that knows the layers (Angelopoulos et al., "Cache Management for Mixture-of-Experts
LLMs", section 4, definition 2).

At time t the piece with the largest R = floor((t - last) / L) is evicted, the last request's
distance in rounds; among those the one with the largest D = (last - t) mod L, whose layer is served
the latest; among those the oldest. A piece of the layer being served has D = 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import Floats, Now, Policy, Setup, State, compiled
from greenroom.policies.helpers import lists
from greenroom.policies.helpers.lists import Lists


class Own(NamedTuple):
    lists: Lists  # one a layer, the oldest piece at the back: in a layer R, D and age agree
    layer: Ints  # [P]
    last: Ints  # [P] clock of the last request
    begin: Ints  # [G + 1] group g has the layers begin[g] .. begin[g + 1] - 1
    weight: Floats  # [L] of a layer's ages, where a policy goes by them (Fate)


def memory(setup: Setup) -> Own:
    begin = [0, setup.layers] if setup.groups == 1 else range(setup.layers + 1)
    return Own(
        lists.empty(setup.pieces, setup.layers),
        setup.layer,
        np.zeros(setup.pieces, np.int64),
        np.array(begin, np.int64),
        np.ones(setup.layers),
    )


@compiled
def on_insert(state: State, own: Own, piece: int, now: Now) -> None:
    own.last[piece] = now.clock
    lists.push(own.lists, own.last.size + own.layer[piece], piece)


@compiled
def on_hit(state: State, own: Own, piece: int, now: Now) -> None:
    lists.unlink(own.lists, piece)
    on_insert(state, own, piece, now)


@compiled
def on_evict(state: State, own: Own, piece: int, now: Now) -> None:
    lists.unlink(own.lists, piece)


@compiled
def victim(state: State, own: Own, group: int, piece: int, now: Now) -> int:
    layers = own.weight.size
    best, most = -1, -1
    for layer in range(own.begin[group], own.begin[group + 1]):
        oldest = lists.last(own.lists, own.last.size + layer, state)
        if oldest >= 0:
            rounds, since = divmod(now.clock - own.last[oldest], layers)
            # R first, then D = (-since) mod L; different layers differ in D.
            rank = rounds * layers + (layers - since if since > 0 else 0)
            if rank > most:
                best, most = oldest, rank
    return int(best)


llru = Policy("llru", memory, victim, on_hit, on_insert, on_evict)
