"""Predictors in a simulation: run over a trace, or replayed where a model is needed."""

from __future__ import annotations

from collections.abc import Iterable

from greenroom.core.predictor import Shape
from greenroom.core.prefetch.foresight import Foresight
from greenroom.errors import UsageError
from greenroom.predictors import AUTO, AUTOMATIC, OFF, PredictorChoice, PredictorSetup, predictor
from greenroom.trace import Trace


def foresight_of(trace: Trace, prefetch: str, seed: int = 0) -> Foresight:
    """Build a predictor over a trace; if it needs a model, replay its recording.

    UsageError where the trace lacks data that the predictor needs.
    """
    choice = resolve_predictor(trace, prefetch)
    shape = Shape(tuple(trace.experts_per_layer.tolist()), trace.top_k)
    if "token_ids" in choice.kind.needs and trace.token_ids is None:
        raise UsageError(
            f"predictor {choice.name} needs token ids, which this trace does not have: record them"
            " with --token-ids"
        )
    setting = PredictorSetup(
        shape, seed, routed_experts=trace.experts, predictions=trace.predictions
    )
    return Foresight(choice.build(setting), trace.offsets.tolist())


def resolve_predictor(trace: Trace, prefetch: str) -> PredictorChoice:
    """Resolve a predictor's name: the predictor itself, or its recording in the trace."""
    choice = predictor(prefetch)
    if choice.kind is AUTO:
        return resolve_predictor(trace, automatic_predictor(trace))
    if choice.kind.needs.isdisjoint(("inputs", "gates", "file")):
        return choice
    if (recording := _find_recording(trace, choice)) is None:
        raise UsageError(
            f"predictor {choice.name} needs a running model, and this trace does not hold its"
            f" predictions: record them (trace record --predict {choice.name})"
            + (f"; it holds {', '.join(trace.predictions)}" if trace.predictions else "")
        )
    return predictor(f"recorded:of={recording}")


def check_predictors(trace: Trace, names: Iterable[str], seed: int = 0) -> list[str]:
    """Resolve the predictor `auto`; check that the trace has each predictor's data.

    Returns the names, each once. UsageError where data is missing.
    """
    resolved = dict.fromkeys(
        automatic_predictor(trace) if name == AUTO.name else name for name in names
    )
    for name in resolved:
        if name != OFF:
            foresight_of(trace, name, seed)
    return list(resolved)


def automatic_predictor(trace: Trace) -> str:
    """Name the predictor for `auto`: a run's, if the trace has its predictions."""
    first, last = AUTOMATIC
    return last if _find_recording(trace, predictor(first)) is None else first


def _find_recording(trace: Trace, choice: PredictorChoice) -> str | None:
    """Find a trace's recorded predictions of a predictor with this kind, distance and options."""
    for name, prediction in trace.predictions.items():
        try:
            by = predictor(name)
        except UsageError:  # not a predictor of Greenroom
            continue
        alike = by.kind is choice.kind and by.options == choice.options
        if alike and choice.distance in (None, prediction.distance):
            return name
    return None
