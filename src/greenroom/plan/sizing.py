"""Cache sizes of layers and splits of experts, chosen by recorded routing.

AdapMoE's dynamic programme gives slots of layers; MoEpic's Algorithm 1 gives budgets and splits,
from the experts that tokens used and those that were predicted.
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
    """Find each layer's number of cache slots with the fewest LRU misses, for any order."""
    return tuple(map(float, optimal_slots(miss_tables(requests, offsets, reset=reset), capacity)))


@dataclass(frozen=True, slots=True)
class CacheConfiguration:
    """Cache configuration that MoEpic's Algorithm 1 chose: slots and splits by layer.

    scope: each layer's budget in experts
    split: the share of an expert that is its top, by layer; None where no layer is split
    """

    scope: tuple[float, ...]
    split: tuple[float, ...] | None

    @classmethod
    def of(cls, activity: Activity, capacity: int, latency: TokenLatency) -> CacheConfiguration:
        """Configure a cache by MoEpic's Algorithm 1, from counts of used and predicted experts."""
        chosen = configure(layer_statistics(activity), float(capacity), latency)
        ratios = tuple(each.ratio for each in chosen)
        cut = any(round(EIGHTHS * ratio) < EIGHTHS for ratio in ratios)
        return cls(tuple(float(each.budget) for each in chosen), ratios if cut else None)


def recorded_activity(trace: Trace, predictions: str | None = None) -> Activity:
    """Count the experts that a trace's tokens used, and those that were predicted.

    Only decode passes count, if the trace has some. `predictions` names predictions of the trace
    (default: the first; without any nothing counts as predicted). UnknownName lists the names.
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

    UsageError where the predictor needs data that the trace does not have.
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
