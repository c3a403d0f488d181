"""LCP: evict the piece of the least cache priority P = mu * rho ** (nu / omega).

mu is the piece's requests since the start (they survive eviction), nu the tokens since its last
request. MoEpic, section 3.3, equation 4; rho 0.25 and omega 128 are its defaults. Ties go to the
piece requested least recently.
"""

from __future__ import annotations

from math import log2
from typing import NamedTuple

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import Floats, Now, Option, Policy, Setup, State, compiled
from greenroom.policies import ranks
from greenroom.policies.ranks import Ranks

NEAR = 1e-9


class Own(NamedTuple):
    ranks: Ranks  # key: log2 mu + last * fade, which ranks as P does at any time
    count: Ints  # type: ignore[assignment]  # [P] mu
    last: Ints  # [P] token of the last request
    numbers: Floats  # rho, omega, fade = log2(1 / rho) / omega


def memory(setup: Setup) -> Own:
    rho, omega = setup.options["rho"], setup.options["omega"]
    none = np.zeros(setup.pieces, np.int64)
    numbers = np.array([rho, omega, log2(1 / rho) / omega])
    return Own(ranks.empty(setup), none, none.copy(), numbers)


@compiled
def count(own: Own, piece: int, now: Now) -> float:
    """Note a request; the piece's key."""
    own.count[piece] += 1
    own.last[piece] = now.token
    return float(np.log2(own.count[piece]) + now.token * own.numbers[2])


@compiled
def on_hit(state: State, own: Own, piece: int, now: Now) -> None:
    ranks.rise(own.ranks, piece, count(own, piece, now), now.index)


@compiled
def on_insert(state: State, own: Own, piece: int, now: Now) -> None:
    ranks.place(own.ranks, piece, count(own, piece, now), now.index)


@compiled
def on_evict(state: State, own: Own, piece: int, now: Now) -> None:
    ranks.drop(own.ranks, piece)


@compiled
def priority(own: Own, piece: int, now: Now) -> float:
    rho, omega = own.numbers[0], own.numbers[1]
    return float(own.count[piece] * rho ** ((now.token - own.last[piece]) / omega))


@compiled
def victim(state: State, own: Own, group: int, piece: int, now: Now) -> int:
    chosen = ranks.lowest(own.ranks, group, state)
    if chosen < 0:
        return -1
    # Logarithms round, and could part what is equal: near the smallest, P itself decides.
    r = own.ranks
    near = r.key[chosen] + NEAR
    least = np.inf
    for block in range(r.blocks[group], r.blocks[group + 1]):
        if r.bound[block] <= near:
            for other in range(r.begin[block], r.begin[block + 1]):
                if r.key[other] <= near and state.pinned[other] == 0:
                    value = priority(own, other, now)
                    if value < least or (value == least and r.tie[other] < r.tie[chosen]):
                        least, chosen = value, other
    return int(chosen)


lcp = Policy(
    "lcp",
    memory,
    victim,
    on_hit,
    on_insert,
    on_evict,
    options=(
        Option("rho", 0.25, "what a piece's priority is multiplied by every omega tokens", 1e-6, 1),
        Option("omega", 128, "tokens", 1),
    ),
)
