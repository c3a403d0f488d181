"""MoEpic's cache configurator: a budget and a split ratio for every layer (Algorithm 1).

Sizes are in experts, times in seconds. A layer with a budget of V experts keeps the top segments of
C experts, each a share theta = V / C of the expert. `expert_split` solves a layer's sub-problem
(equations 9 to 11) and carries the windows from layer to layer (5 to 7); `configure` moves
zeta * Ve of budget at a time from the layer that loses least by it to the one that gains most,
until nothing is gained: a fixed-point iteration.

Where the paper leaves a choice: P(y, C) of equation 10 is read as P(y); of several C with the same
m the smallest is taken; a fraction of a budget may stay unused (theta = 1 for floor(V) experts); a
layer whose budget would not stay above 0 (equation 8) gives none away; and T_head is 0 where only a
machine's profile is known: the layers' times include it then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from greenroom.core.activity import Activity
from greenroom.core.cost import Costs
from greenroom.errors import BudgetError, UsageError

Floats = NDArray[np.float64]
ZETA = 0.01  # share of all budget that one step moves
TAU = 5000  # tokens before a configuration (the paper's: between two)


@dataclass(frozen=True, slots=True)
class TokenLatency:
    """Seconds of one token in MoEpic's model: T_att and T_moe of a layer, T_head, T_load.

    T_load is of an expert.
    """

    attention: float
    moe: float
    head: float
    load: float

    @classmethod
    def of(cls, costs: Costs, expert_bytes: int, top_k: int, head: float = 0.0) -> TokenLatency:
        """Derive a token's times in MoEpic's model from a machine's costs.

        The dense part of a layer includes its share of the head where `head` is 0.
        """
        slowest = min(link.bandwidth for link in costs.links)
        moe = top_k * costs.expert.seconds(1)
        return cls(costs.dense.seconds(1), moe, head, expert_bytes / slowest)


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """Recorded routing statistics of a layer of N experts; a token activates `top_k` (K).

    hits: H(C) [N + 1]; accuracy: P(y) [N + 1]; predicted_hits: PH(y, C) [N + 1, N + 1]
    """

    top_k: float
    hits: Floats
    accuracy: Floats
    predicted_hits: Floats

    @property
    def experts(self) -> int:
        return self.hits.size - 1


@dataclass(frozen=True, slots=True)
class LayerAllocation:
    """MoEpic's allocation of cache to one layer.

    budget:  V, in experts
    cached:  C, experts with a resident top segment
    ratio:   theta, a top segment's share of its expert
    loaded:  m, experts that are loaded after prefetching
    exposed: the exposed latency
    window:  the prefetch window that it leaves to the next layer
    """

    budget: float
    cached: int
    ratio: float
    loaded: float
    exposed: float
    window: float


def layer_statistics(activity: Activity) -> list[LayerStatistics]:
    """Return the recorded routing statistics of all layers."""
    return [
        LayerStatistics(
            activity.activated[i] / max(1, activity.tokens[i]),
            activity.hit_ratio(i),
            activity.accuracy(i),
            activity.predicted_hits(i),
        )
        for i in range(len(activity.experts))
    ]


def best_split(
    layer: LayerStatistics, budget: float, window: float, latency: TokenLatency
) -> tuple[int, float, float]:
    """Find the best split of a layer's experts (MoEpic, equation 11): (C, theta, m)."""
    least = max(1, min(layer.experts, int(budget + 1e-9)))
    cached = np.arange(least, layer.experts + 1)
    ratio = np.minimum(1.0, budget / cached)
    # [C, y]: the expected share of the y-th predicted expert that must be fetched
    part = 1 - layer.predicted_hits[1:, cached].T * ratio[:, None]
    done = np.cumsum(part * latency.load, axis=1) <= window  # a prefix, since every part takes time
    ahead = (part * layer.accuracy[1:] * done).sum(axis=1)
    loaded = np.minimum(layer.top_k, layer.top_k * layer.hits[cached] * ratio + ahead)
    at = int(np.argmax(loaded))
    return int(cached[at]), float(ratio[at]), float(loaded[at])


def expert_split(
    layers: Sequence[LayerStatistics], budgets: Sequence[float] | Floats, latency: TokenLatency
) -> list[LayerAllocation]:
    """Choose each layer's ratio of split experts (MoEpic's function ExpertSplit).

    Layers are in order, since each leaves a window to the next one.
    """
    window, allocations = latency.head + latency.attention, []
    for layer, budget in zip(layers, budgets, strict=True):
        cached, ratio, loaded = best_split(layer, budget, window, latency)
        hide = loaded * latency.moe / layer.top_k
        miss = (layer.top_k - loaded) * latency.load
        window = latency.moe - min(hide, miss) + latency.attention
        allocations.append(
            LayerAllocation(budget, cached, ratio, loaded, max(0.0, miss - hide), window)
        )
    return allocations


def configure(
    layers: Sequence[LayerStatistics], budget: float, latency: TokenLatency, zeta: float = ZETA
) -> list[LayerAllocation]:
    """Divide a budget of experts among layers and choose split ratios (MoEpic's VramAllocation).

    It starts from a uniform allocation.

    UsageError for a zeta outside (0, 1), BudgetError without a budget.
    """
    if not 0 < zeta < 1:
        raise UsageError(f"zeta must be above 0 and below 1: {zeta:g}")
    if budget <= 0:
        raise BudgetError(f"the budget must be above 0 experts: {budget:g}")
    step = zeta * budget
    budgets = np.full(len(layers), budget / len(layers))
    while True:
        now = expert_split(layers, budgets, latency)
        larger = expert_split(layers, budgets + step, latency)
        smaller = expert_split(layers, np.maximum(budgets - step, 1e-9), latency)
        gains = np.array([a.exposed - b.exposed for a, b in zip(now, larger, strict=True)])
        losses = np.array([b.exposed - a.exposed for a, b in zip(now, smaller, strict=True)])
        receiver = int(np.argmax(gains))
        losses[(budgets - step <= 1e-9) | (np.arange(budgets.size) == receiver)] = np.inf
        donor = int(np.argmin(losses))
        if np.isinf(losses[donor]):
            return now
        moved = budgets.copy()
        moved[receiver] += step
        moved[donor] -= step
        after = expert_split(layers, moved, latency)
        if sum(each.exposed for each in after) >= sum(each.exposed for each in now):
            return now
        budgets = moved
