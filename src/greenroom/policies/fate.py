"""Fate's shallow-favouring cache, in our reading: its abstract names the idea and no formula.

Evict the piece with the largest age * (1 + bias * l / L): age is the time since its last request in
steps, l its layer from 0. So of two pieces of one age the shallower stays, whose layer leaves less
time to predict and prefetch. `bias` 0 is LRU by steps. Ties go to the deepest layer, and within a
layer to the piece requested least recently.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.policy import Floats, Now, Option, Policy, Setup, State, compiled
from greenroom.policies import lists, llru


class Own(NamedTuple):
    layers: llru.Own
    weight: Floats  # [L] 1 + bias * l / L


def memory(setup: Setup) -> Own:
    weight = 1 + setup.options["bias"] * np.arange(setup.layers) / setup.layers
    return Own(llru.memory(setup), weight)


@compiled
def on_insert(state: State, own: Own, piece: int, now: Now) -> None:
    llru.on_insert(state, own.layers, piece, now)


@compiled
def on_hit(state: State, own: Own, piece: int, now: Now) -> None:
    llru.on_hit(state, own.layers, piece, now)


@compiled
def on_evict(state: State, own: Own, piece: int, now: Now) -> None:
    llru.on_evict(state, own.layers, piece, now)


@compiled
def victim(state: State, own: Own, group: int, piece: int, now: Now) -> int:
    last, begin = own.layers.last, own.layers.begin
    best, most = -1, -1.0
    for layer in range(begin[group], begin[group + 1]):
        oldest = lists.last(own.layers.lists, last.size + layer, state)
        if oldest >= 0:
            age = (now.clock - last[oldest]) * own.weight[layer]
            if age >= most:
                best, most = oldest, age
    return int(best)


fate = Policy(
    "fate",
    memory,
    victim,
    on_hit,
    on_insert,
    on_evict,
    options=(Option("bias", 1.0, "how much more the age of deep layers counts", 0),),
)
