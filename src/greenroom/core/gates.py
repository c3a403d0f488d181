"""How much an expert matters to a token: HOBBIT's score, from gate weights alone.

A token's gate weights, normalised to a sum of 1, are taken in descending order. HOBBIT (section
3.2, equation 2) gives expert i the score s_i = the sum of those before it: 0 is the most important
one, and it grows as an expert matters less. Here it is told from the other end: an expert's *tail*
is 1 - s_i, its own weight and all smaller ones. The first expert's tail is 1. HOBBIT's thresholds
T1 = 0.6 and T2 = 0.9 on s are 0.4 and 0.1 on tails. The paper finds the weight to go with the size
of what the expert gives (correlation 0.99), and it is known before anything is fetched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


def tails(weights: Floats) -> NDArray[np.float32]:
    """Of gate weights [..., K] each one's tail, [..., K]; equal weights count as they lie.

    Weights are taken in float16, as a trace tells them, so that a replay decides as the run did.
    Where all are 0, every tail is 1.
    """
    each = np.abs(weights.astype(np.float16).astype(np.float64))
    order = np.argsort(-each, axis=-1, kind="stable")
    ranked = np.take_along_axis(each, order, -1)
    behind = np.cumsum(ranked[..., ::-1], -1)[..., ::-1]  # its own, and all smaller ones
    total = behind[..., :1]
    shares = np.divide(behind, total, out=np.ones_like(behind), where=total > 0)
    found = np.empty(each.shape, np.float32)
    np.put_along_axis(found, order, shares.astype(np.float32), -1)
    return found


def of_experts(
    chosen: NDArray[np.integer[Any]], weights: Floats, experts: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Of each expert of a step its largest tail, over the tokens that chose it: [n] float32.

    chosen [T, K] are each token's experts, `experts` [n] those of the step, ascending and distinct;
    what a token chose beside them is no expert.
    """
    found = np.zeros(experts.size, np.float32)
    flat = chosen.ravel()
    at = np.minimum(np.searchsorted(experts, flat), experts.size - 1)
    there = experts[at] == flat
    np.maximum.at(found, at[there], tails(weights).ravel()[there])
    return found
