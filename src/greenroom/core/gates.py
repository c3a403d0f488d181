"""Tail weights: how much an expert matters to a token, by its gate weights (HOBBIT's score).

HOBBIT (section 3.2, equation 2) sorts a token's gate weights, normalised to a sum of 1, in
descending order. The score of expert i is the sum of the weights before it: s_i = 0 for the most
important expert, and s_i grows as an expert matters less. Greenroom uses the complement. An
expert's *tail weight* is 1 - s_i: its own weight and all smaller ones. The first expert's tail
weight is 1. HOBBIT's thresholds T1 = 0.6 and T2 = 0.9 on s are tail weights of 0.4 and 0.1. The
paper finds that gate weights correlate with the norms of the experts' outputs (0.99), and they are
known before anything is fetched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


def tail_weights(weights: Floats) -> NDArray[np.float32]:
    """Return each expert's share of a token's gate weights, from its rank down.

    weights: gate weights [..., K] of the K experts that each token chose
    returns: tail weights [..., K], from the expert's own weight and all smaller ones

    Of equal weights the one that comes first has the higher rank. Weights are rounded to float16,
    as a trace stores them, so that a simulation of the trace decides as the run did. If all weights
    are 0, every tail weight is 1.
    """
    each = np.abs(weights.astype(np.float16).astype(np.float64))
    order = np.argsort(-each, axis=-1, kind="stable")
    ranked = np.take_along_axis(each, order, -1)
    sums = np.cumsum(ranked[..., ::-1], -1)[..., ::-1]  # of a weight and all smaller ones
    total = sums[..., :1]
    shares = np.divide(sums, total, out=np.ones_like(sums), where=total > 0)
    result = np.empty(each.shape, np.float32)
    np.put_along_axis(result, order, shares.astype(np.float32), -1)
    return result


def expert_tail_weights(
    chosen: NDArray[np.integer[Any]], weights: Floats, experts: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the largest tail weight of each expert over the tokens that chose it.

    chosen:  the experts of each of T tokens, [T, K]
    weights: their gate weights, [T, K]
    experts: the experts to return tail weights for, ascending and distinct, [n]

    Returns [n]. Ids in `chosen` that are not in `experts` are ignored.
    """
    result = np.zeros(experts.size, np.float32)
    flat = chosen.ravel()
    at = np.minimum(np.searchsorted(experts, flat), experts.size - 1)
    matches = experts[at] == flat
    np.maximum.at(result, at[matches], tail_weights(weights).ravel()[matches])
    return result
