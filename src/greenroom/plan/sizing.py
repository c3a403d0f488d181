"""Cache sizes of layers, and splits of experts, chosen from recorded routing.

AdapMoE's dynamic programme gives the slots of each layer. MoEpic's Algorithm 1 gives each layer's
budget and the share of its experts in their top segments. Algorithm 1 counts the experts that
tokens used, and the experts that were predicted for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from greenroom.core.activity import Activity
from greenroom.core.pieces import Ints
from greenroom.core.predictor import LayerRouting
from greenroom.core.stream import Stream
from greenroom.errors import UnknownName
from greenroom.plan.budgets import miss_tables, optimal_slots
from greenroom.plan.configurator import TokenLatency, configure, layer_statistics
from greenroom.predictors import OFF
from greenroom.sim.event_driven import passes
from greenroom.sim.foresight import foresight_of
from greenroom.trace import Trace, stream

EIGHTHS = 8  # a simulation splits at eighths: a ratio nearer to 1 than to 7/8 is 1


def slots_with_fewest_misses(
    requests: Stream, offsets: Ints, capacity: int, *, reset: bool = False
) -> tuple[float, ...]:
    """Find each layer's number of cache slots with the fewest LRU misses in total.

    `offsets` [layers + 1] are the ids at which each layer's experts begin; `capacity` is the number
    of slots of all layers. `reset` empties the caches before each prompt. BudgetError if there are
    fewer slots than layers.
    """
    return tuple(map(float, optimal_slots(miss_tables(requests, offsets, reset=reset), capacity)))


@dataclass(frozen=True, slots=True)
class CacheConfiguration:
    """Cache configuration chosen by MoEpic's Algorithm 1: slots and splits by layer.

    scope: each layer's cache size in experts
    split: share of an expert in its top segment, which is cached, for each layer; None if no
           layer's experts are split
    """

    scope: tuple[float, ...]
    split: tuple[float, ...] | None

    @classmethod
    def of(cls, activity: Activity, capacity: int, latency: TokenLatency) -> CacheConfiguration:
        """Configure a cache of `capacity` slots by MoEpic's Algorithm 1.

        `activity` counts the experts that tokens used, and those predicted for them.
        """
        chosen = configure(layer_statistics(activity), float(capacity), latency)
        ratios = tuple(each.ratio for each in chosen)
        cut = any(round(EIGHTHS * ratio) < EIGHTHS for ratio in ratios)
        return cls(tuple(float(each.budget) for each in chosen), ratios if cut else None)


def recorded_activity(trace: Trace, predictions: str | None = None) -> Activity:
    """Count the experts that a trace's tokens used, and those that were predicted.

    Only decode passes count, if the trace has any. `predictions` is the name of recorded
    predictions; the default is the first ones, or none if the trace has none. UnknownName if the
    trace has no predictions of that name.
    """
    if predictions is not None and predictions not in trace.predictions:
        raise UnknownName("predictions", predictions, trace.predictions)
    prediction = trace.predictions.get(predictions or next(iter(trace.predictions), ""))
    activity, decoded = Activity(trace.experts_per_layer.tolist()), ~trace.pass_prefill
    tokens = np.repeat(decoded | ~decoded.any(), np.diff(trace.pass_starts))
    for token in np.flatnonzero(tokens).tolist():
        for layer, experts in enumerate(trace.experts[token].astype(np.int64)):
            expected = None
            if prediction is not None:
                row = prediction.experts[token, layer]
                expected = row[row < np.iinfo(row.dtype).max].astype(np.int64)
            activity.token(layer, experts, expected)
    return activity


def predicted_activity(trace: Trace, prefetch: str) -> Activity:
    """Count a trace's used and predicted experts, with a predictor replayed over the trace.

    `prefetch` names the predictor; with `off` no expert counts as predicted. UsageError if the
    predictor needs data that the trace does not have.
    """
    activity = Activity(trace.experts_per_layer.tolist())
    foresight = None if prefetch == OFF else foresight_of(trace, prefetch)
    prompts_only, expected = bool(trace.pass_prefill.all()), dict[int, Ints]()
    for at, steps in passes(trace, stream(trace, "runtime")):
        events = foresight.begin(at) if foresight else []
        for step in steps:
            expected |= {e.layer: e.experts - trace.offsets[e.layer] for e in events}
            assert step.chosen is not None
            if prompts_only or not at.prefill:
                for row in step.chosen:
                    activity.token(step.layer, row, expected.pop(step.layer, None))
            events = foresight.routed(LayerRouting(step.layer, step.chosen)) if foresight else []
    return activity
