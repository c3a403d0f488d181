"""HybriMoE's eviction policy: evict the expert with the lowest average router score.

The abstract has no formula. Public descriptions of the paper (Zhong et al., 2025, arXiv 2504.05897,
section IV-D) give its score, MRS, as S = alpha * TopP(s) + (1 - alpha) * S: the p highest router
scores of a token count, with p about twice the top-k. A policy observes only the experts that
tokens choose, so here p is the top-k. Whenever an expert's layer is computed, its average is
updated. s is the expert's share of the gate weights in this pass at the layer, or of its tokens if
the weights are unknown; s is 0 if no token chose the expert. The expert with the smallest S is
evicted; of equal ones, the one requested least recently. The default of `alpha` is Greenroom's.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import (
    CacheState,
    Floats,
    Ids,
    LogicalTime,
    Policy,
    PolicyOption,
    PolicySetup,
    Rows,
    Weights,
    compiled,
)
from greenroom.policies.helpers import scan


class HybriMoeState(NamedTuple):
    """State arrays of the HybriMoE eviction policy, for P experts and L layers."""

    score: Floats  # [P] S
    index: Ints  # type: ignore[assignment]  # [P] index of the last request
    begin: Ints  # [L + 1] layer l has the pieces begin[l] .. begin[l + 1] - 1
    alpha: Floats  # [1]


def build_state(setup: PolicySetup) -> HybriMoeState:
    alpha = np.array([setup.options["alpha"]], np.float64)
    return HybriMoeState(
        np.zeros(setup.pieces), np.zeros(setup.pieces, np.int64), scan.layer_starts(setup), alpha
    )


@compiled
def contribution(rows: Rows, weights: Weights, i: int) -> float:
    """Return the weight of a step's i-th expert in HybriMoE's score.

    It is the expert's gate weight; its number of tokens if gate weights are unknown; else 1.
    """
    if weights.size:
        return float(weights[i])
    return float(rows[i]) if rows.size else 1.0


@compiled
def on_step(
    cache: CacheState,
    state: HybriMoeState,
    pieces: Ids,
    rows: Rows,
    weights: Weights,
    now: LogicalTime,
) -> None:
    alpha = state.alpha[0]
    for piece in range(state.begin[now.layer], state.begin[now.layer + 1]):
        state.score[piece] *= 1 - alpha
    total = 0.0
    for i in range(pieces.size):
        total += contribution(rows, weights, i)
    if total > 0:
        for i in range(pieces.size):
            state.score[pieces[i]] += alpha * (contribution(rows, weights, i) / total)


@compiled
def victim(
    cache: CacheState, state: HybriMoeState, group: int, piece: int, now: LogicalTime
) -> int:
    return int(scan.lowest_unpinned(cache, group, state.score, state.index))


hybrimoe = Policy(
    "hybrimoe",
    build_state,
    victim,
    scan.on_use,
    scan.on_use,
    on_step=on_step,
    weighs=True,
    options=(PolicyOption("alpha", 0.05, "weight of the newest score", 1e-6, 1),),
)
