"""MoEpic's cache configurator (Algorithm 1): a budget and a split ratio for every layer.

Sizes are in experts, times in seconds. A split expert has a top segment, which stays in the cache,
and a bottom segment, which is fetched when the expert is used. A layer with a budget of V experts
caches the top segments of C experts; each top segment is a share theta = V / C of its expert.
`expert_split` chooses C and theta for each layer (equations 9 to 11). It passes on the prefetch
window, the time that a layer leaves for loading experts of the next one (equations 5 to 7).
`configure` moves a share zeta of the total budget at a time, from the layer that loses least by the
move to the layer that gains most, until no move shortens the exposed latency.

The paper leaves some choices open. P(y, C) of equation 10 is read as P(y). H and PH count the C
experts of the highest cache priority as cached. If several C load equally many experts m, the
smallest C is taken. A fraction of a budget may stay unused (theta = 1 for floor(V) experts). A
layer whose budget would fall to 0 or below (equation 8) gives nothing away. T_head is 0 if only a
machine's profile is available: the layers' times then include the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from greenroom.core.activity import Activity
from greenroom.core.cache.scope import Scope
from greenroom.core.cost import Costs
from greenroom.core.pieces import Split
from greenroom.errors import BudgetError, UsageError

Floats = NDArray[np.float64]
ZETA = 0.01  # share of all budget that one step moves


@dataclass(frozen=True, slots=True)
class TokenLatency:
    """Seconds of the parts of one token's decoding, in MoEpic's latency model.

    attention: T_att, a layer without its experts
    moe:       T_moe, the computation of a layer's experts
    head:      T_head, the output head
    load:      T_load, the transfer of one expert
    """

    attention: float
    moe: float
    head: float
    load: float

    @classmethod
    def of(cls, costs: Costs, expert_bytes: int, top_k: int, head: float = 0.0) -> TokenLatency:
        """Derive a token's times in MoEpic's latency model from a machine's costs.

        `top_k` is the number of experts that a token uses in a layer. `head` are the seconds of the
        output head; with 0, the times of the layers include them.
        """
        slowest = min(link.bandwidth for link in costs.links)
        moe = top_k * costs.expert.seconds(1)
        return cls(costs.dense.seconds(1), moe, head, expert_bytes / slowest)


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """Recorded routing statistics of one MoE layer with N experts (MoEpic, section 3.4.2).

    top_k:          experts that a token activates, a mean over tokens
    hits:           H(C), share of the activated experts that a cache of C experts holds, [N + 1]
    accuracy:       P(y), share of tokens that activate the expert predicted at rank y, [N + 1]
    predicted_hits: PH(y, C), share of tokens for which the expert predicted at rank y was in a
                    cache of C experts, activated or not, [N + 1, N + 1]
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

    budget:  V, size of the layer's cache in experts
    cached:  C, number of experts whose top segment is in the cache
    ratio:   theta, a top segment's share of its expert
    loaded:  m, activated experts in memory before they are computed, expected for a token
    exposed: seconds of loading that computing does not hide
    window:  seconds in which experts of the next layer can be prefetched
    """

    budget: float
    cached: int
    ratio: float
    loaded: float
    exposed: float
    window: float


def layer_statistics(activity: Activity) -> list[LayerStatistics]:
    """Return the routing statistics of all layers from counts of expert activations."""
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
    """Find the split with which most experts load in time (MoEpic, equation 11).

    `budget` is the size of the layer's cache in experts, `window` the seconds for prefetching.
    Returns C, the number of experts with a cached top segment; theta, a top segment's share of its
    expert; and m, the activated experts in memory before they are computed.
    """
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


def given_split(
    layer: LayerStatistics, budget: float, window: float, latency: TokenLatency, ratio: float
) -> tuple[int, float, float]:
    """Compute how many experts load in time with a given split ratio (MoEpic, equation 10).

    Arguments and result are those of `best_split`. A fraction of a cached expert counts in
    proportion, so that a small change of the budget has an effect.
    """
    cached = min(float(layer.experts), budget / ratio)
    below = int(cached + 1e-9)
    above, share = min(below + 1, layer.experts), max(0.0, cached - below)
    hits = (1 - share) * layer.hits[below] + share * layer.hits[above]
    both = layer.predicted_hits[1:]
    part = 1 - ((1 - share) * both[:, below] + share * both[:, above]) * ratio
    done = np.cumsum(part * latency.load) <= window
    ahead = float((part * layer.accuracy[1:] * done).sum())
    return below, ratio, min(layer.top_k, layer.top_k * float(hits) * ratio + ahead)


def expert_split(
    layers: Sequence[LayerStatistics],
    budgets: Sequence[float] | Floats,
    latency: TokenLatency,
    ratios: Sequence[float] | None = None,
) -> list[LayerAllocation]:
    """Choose each layer's split of experts (MoEpic's function ExpertSplit).

    `budgets` are the sizes of the layers' caches in experts. The layers must be in the model's
    order, since each one determines the prefetch window of the next. `ratios` gives each layer's
    split ratio; None: they are chosen.
    """
    window, allocations = latency.head + latency.attention, []
    each = [None] * len(layers) if ratios is None else ratios
    for layer, budget, fixed in zip(layers, budgets, each, strict=True):
        if fixed is None:
            cached, ratio, loaded = best_split(layer, budget, window, latency)
        else:
            cached, ratio, loaded = given_split(layer, budget, window, latency, fixed)
        hide = loaded * latency.moe / layer.top_k
        miss = (layer.top_k - loaded) * latency.load
        window = latency.moe - min(hide, miss) + latency.attention
        allocations.append(
            LayerAllocation(budget, cached, ratio, loaded, max(0.0, miss - hide), window)
        )
    return allocations


def configure(
    layers: Sequence[LayerStatistics],
    budget: float,
    latency: TokenLatency,
    zeta: float = ZETA,
    ratios: Sequence[float] | None = None,
    present: Sequence[float] | None = None,
) -> list[LayerAllocation]:
    """Divide a budget of experts among layers and choose split ratios (MoEpic's VramAllocation).

    `budget` is the size of the cache in experts. The search starts from `present`, the layers'
    budgets until now, in proportion to which the budget is divided; None: from equal budgets, as
    before the first call (line 4 of Algorithm 1). It moves a share `zeta` of the total budget in
    each step. With `ratios` (one for each layer, as in a cache whose slots have their sizes
    already) only budgets are chosen. UsageError for a zeta outside (0, 1), BudgetError for a budget
    that is not above 0.
    """
    if not 0 < zeta < 1:
        raise UsageError(f"--zeta must be above 0 and below 1, got {zeta:g}")
    if budget <= 0:
        raise BudgetError(f"the cache must have more than 0 slots, got {budget:g}")
    split = partial(expert_split, layers, latency=latency, ratios=ratios)
    step = zeta * budget
    shares = np.ones(len(layers)) if present is None else np.asarray(present, np.float64)
    budgets = budget * shares / shares.sum()
    while True:
        now = split(budgets)
        larger = split(budgets + step)
        smaller = split(np.maximum(budgets - step, 1e-9))
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
        after = split(moved)
        if sum(each.exposed for each in after) >= sum(each.exposed for each in now):
            return now
        budgets = moved


@dataclass(frozen=True, slots=True)
class Division:
    """Division of a cache's slots among layers by Algorithm 1, with given split ratios.

    budget: memory of the slots that are divided, in unsplit experts; without the bottom segments'
    ratios: each layer's share of an expert in its top segment; 1 if its experts are not split
    """

    budget: float
    latency: TokenLatency
    ratios: tuple[float, ...]

    @classmethod
    def of(cls, capacity: int, latency: TokenLatency, layers: int, split: Split | None) -> Division:
        """Describe the division of a cache of `capacity` unsplit experts; `split` may be None."""
        if split is None:
            return cls(float(capacity), latency, (1.0,) * layers)
        return cls(capacity - split.reserved / split.unsplit_bytes, latency, split.ratios)

    def __call__(self, activity: Activity, scope: Scope) -> tuple[float, ...]:
        """Return each layer's cache size in experts, for counts of used and predicted experts.

        The search starts from `scope`, the present division of the slots.
        """
        layers, present = layer_statistics(activity), None if isinstance(scope, str) else scope
        chosen = configure(layers, self.budget, self.latency, ratios=self.ratios, present=present)
        return tuple(float(each.budget) for each in chosen)
