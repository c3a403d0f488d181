"""Expert predictors in a simulation: computed from a trace, or replayed from recordings.

MoEpic divides the cache's slots among layers anew every tau tokens (Algorithm 1, lines 8 to 10),
by the experts that tokens used and those that were predicted. `CountedForesight` counts both.
`Reconfiguration` calls a function that computes a division from the counts, and applies the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

from greenroom.core.activity import Activity
from greenroom.core.cache.scope import Scope
from greenroom.core.events import Predicted, Resized
from greenroom.core.pieces import Ints
from greenroom.core.predictor import LayerRouting, PassStart, Predictor, Shape
from greenroom.core.prefetch.foresight import Foresight
from greenroom.errors import UsageError
from greenroom.predictors import AUTO, AUTOMATIC, OFF, PredictorChoice, PredictorSetup, predictor
from greenroom.sim.clock import Clock, TraceStep
from greenroom.trace import Trace

# The experts that were used and predicted so far, the present scope -> each layer's cache size.
Divide: TypeAlias = Callable[[Activity, Scope], tuple[float, ...]]


def foresight_of(trace: Trace, prefetch: str, seed: int = 0) -> Foresight:
    """Build the predictor named by `prefetch`, for a simulation of a trace.

    A predictor that needs a running model is replayed from the predictions in the trace. Raises
    UsageError if the trace lacks predictions or token ids that the predictor needs.
    """
    choice = resolve_predictor(trace, prefetch)
    shape = Shape(tuple(trace.experts_per_layer.tolist()), trace.top_k)
    if "token_ids" in choice.kind.needs and trace.token_ids is None:
        raise UsageError(
            f"predictor {choice.name} needs token ids, which this trace does not have: record the"
            " trace again with `greenroom trace record --token-ids`"
        )
    setting = PredictorSetup(
        shape, seed, routed_experts=trace.experts, predictions=trace.predictions
    )
    return Foresight(choice.build(setting), trace.offsets.tolist())


def resolve_predictor(trace: Trace, prefetch: str) -> PredictorChoice:
    """Return the predictor to simulate for a name: itself, or its recording in the trace.

    Raises UsageError if the predictor needs a running model and the trace has no recording of it.
    """
    choice = predictor(prefetch)
    if choice.kind is AUTO:
        return resolve_predictor(trace, automatic_predictor(trace))
    if choice.kind.needs.isdisjoint(("inputs", "gates", "file")):
        return choice
    recording = _find_recording(trace, choice)
    if recording is None and choice.kind.replays_routing:
        return choice
    if recording is None:
        raise UsageError(
            f"predictor {choice.name} needs a running model, and this trace does not have its"
            f" predictions: record them with `greenroom trace record --predict {choice.name}`"
            + (f"; the trace has {', '.join(trace.predictions)}" if trace.predictions else "")
        )
    # Not parsed: the name of a recording may have options of its own, with commas.
    return replace(
        predictor("recorded"), name=f"recorded:of={recording}", options={"of": recording}
    )


def check_predictors(trace: Trace, names: Iterable[str], seed: int = 0) -> list[str]:
    """Check that a trace has the data that the named predictors need.

    Returns the distinct names, with a concrete predictor in place of `auto`. Raises UsageError if
    data is missing.
    """
    resolved = dict.fromkeys(
        automatic_predictor(trace) if name == AUTO.name else name for name in names
    )
    for name in resolved:
        if name != OFF:
            foresight_of(trace, name, seed)
    return list(resolved)


def automatic_predictor(trace: Trace) -> str:
    """Return the name of the predictor that `auto` stands for with a trace.

    It is `next-gate`, as in a run, if the trace has its predictions; otherwise `markov`.
    """
    first, last = AUTOMATIC
    return last if _find_recording(trace, predictor(first)) is None else first


def _find_recording(trace: Trace, choice: PredictorChoice) -> str | None:
    """Return the name under which a trace has a predictor's predictions; None if it has none."""
    for name, prediction in trace.predictions.items():
        try:
            by = predictor(name)
        except UsageError:  # not a predictor of Greenroom
            continue
        alike = by.kind is choice.kind and by.options == choice.options
        if alike and choice.distance in (None, prediction.distance):
            return name
    return None


def teach_predictor(
    foresight: Foresight, earlier: Foresight, passes: list[tuple[PassStart, list[TraceStep]]]
) -> None:
    """Teach a predictor by passes of an earlier trace.

    foresight: the predictor to teach
    earlier:   another predictor of its kind, which observes `passes`; what it learns is copied to
               the first one. Nothing is done if predictors of this kind learn nothing
    """
    if not earlier.predictor.state():
        return
    for at, steps in passes:
        earlier.begin(at)
        for step in steps:
            assert step.chosen is not None
            earlier.routed(LayerRouting(step.layer, step.chosen))
    foresight.predictor.restore(earlier.predictor.state())


class CountedForesight(Foresight):
    """A predictor whose predictions, and the experts of decoded tokens, are counted.

    activity: the counts since the start of the trace
    """

    def __init__(self, predictor: Predictor, offsets: Sequence[int]) -> None:
        super().__init__(predictor, offsets)
        self.activity = Activity([b - a for a, b in pairwise(offsets)])
        self._first = tuple(offsets)
        self._expected: dict[int, Ints] = {}
        self._in_prompt = False

    def begin(self, at: PassStart) -> list[Predicted]:
        """Begin a forward pass; returns predictions of its first layers' experts."""
        self._in_prompt = at.prefill
        return self._note(super().begin(at))

    def routed(self, routing: LayerRouting) -> list[Predicted]:
        """Count the experts that a router chose; returns predictions for later layers."""
        if not self._in_prompt:
            expected = self._expected.pop(routing.layer, None)
            for row in routing.experts:
                self.activity.token(routing.layer, row, expected)
        return self._note(super().routed(routing))

    def _note(self, events: list[Predicted]) -> list[Predicted]:
        self._expected |= {each.layer: each.experts - self._first[each.layer] for each in events}
        return events


class Reconfiguration:
    """Divides the slots of a simulated cache among layers every `tau` decoded tokens."""

    def __init__(self, counted: CountedForesight, tau: int, divide: Divide, scope: Scope) -> None:
        self.counted, self._scope = counted, scope
        self._tau, self._divide, self._due = tau, divide, tau

    def between_requests(self, clock: Clock) -> None:
        """Divide the slots anew, if tau tokens were decoded since the last division.

        A cache that was emptied and built again gets the last division again.
        """
        tokens, scheduler = int(self.counted.activity.tokens.min()), clock.scheduler
        if tokens >= self._due:
            self._due = tokens + self._tau
            self._scope = self._divide(self.counted.activity, self._scope)
        if scheduler.view.scope != self._scope:
            clock.send(Resized(scheduler.capacity, scope=self._scope))
