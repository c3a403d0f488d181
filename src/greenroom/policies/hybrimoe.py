"""HybriMoE's score-based cache, in our reading: its abstract names the idea and no formula.

Every expert has a running average of its router score, S = alpha * s + (1 - alpha) * S, renewed
whenever its layer is served: s is the expert's share of the gate weights of the step (of the rows
where weights are not known), 0 where it was not chosen. The smallest S is evicted. Ties go to the
piece requested least recently.
"""

from __future__ import annotations

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
from greenroom.policies.helpers import scan


class Own(NamedTuple):
    score: Floats  # [P] S
    index: Ints  # type: ignore[assignment]  # [P] index of the last request
    begin: Ints  # [L + 1] layer l has the pieces begin[l] .. begin[l + 1] - 1
    alpha: Floats  # [1]


def memory(setup: Setup) -> Own:
    alpha = np.array([setup.options["alpha"]], np.float64)
    return Own(
        np.zeros(setup.pieces), np.zeros(setup.pieces, np.int64), scan.layer_starts(setup), alpha
    )


@compiled
def part(rows: Rows, weights: Weights, i: int) -> float:
    """What request i of a step counts."""
    if weights.size:
        return float(weights[i])
    return float(rows[i]) if rows.size else 1.0


@compiled
def on_step(state: State, own: Own, pieces: Ids, rows: Rows, weights: Weights, now: Now) -> None:
    alpha = own.alpha[0]
    for piece in range(own.begin[now.layer], own.begin[now.layer + 1]):
        own.score[piece] *= 1 - alpha
    total = 0.0
    for i in range(pieces.size):
        total += part(rows, weights, i)
    if total > 0:
        for i in range(pieces.size):
            own.score[pieces[i]] += alpha * (part(rows, weights, i) / total)


@compiled
def victim(state: State, own: Own, group: int, piece: int, now: Now) -> int:
    return int(scan.lowest(state, group, own.score, own.index))


hybrimoe = Policy(
    "hybrimoe",
    memory,
    victim,
    scan.on_use,
    scan.on_use,
    on_step=on_step,
    weighs=True,
    options=(Option("alpha", 0.05, "weight of the newest score", 1e-6, 1),),
)
