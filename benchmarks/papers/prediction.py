"""Accuracy of the predictors from routing alone, by distance (ProMoE, figure 8).

Accuracy: the share of the experts used that were among the top-k predicted, a mean over layers.
Every predictor begins with nothing and learns as it runs; the first half of a recording's requests
is not counted. Each token is a pass of its own, as in an answer; DeepSeek-V2-Lite was recorded in
prefill, where a pass is a whole prompt: its tokens are taken one by one, and as they came
("prefill"). For predictors of whole passes the distance is that to the beginning of the pass: one
number. Only OLMoE was recorded with token ids, which token and routing-path use.
`early` is the path of routing-path before a pass begins. Time is that of `begin`, `observe`
and `predict` of a one-token pass, with warm caches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from common import MODELS, limit, options, percent, recordings, table

from greenroom.core.predictor import LayerPrediction, LayerRouting, Predictor, Shape
from greenroom.predictors import PREDICTORS, PredictorSetup, predictor
from greenroom.runtime.recording.forecasts import ForecastRecorder
from greenroom.sim.event_driven import passes
from greenroom.trace import Trace, stream

DISTANCES = (1, 2, 4, 8)
NAMES = ["popularity", "token", "markov", "eamc", "routing-path"]


def shape_of(trace: Trace) -> Shape:
    return Shape(tuple(trace.experts_per_layer.tolist()), trace.top_k)


def token_by_token(trace: Trace) -> Trace:
    """The recording with every token as a decode pass of its own."""
    return replace(
        trace,
        pass_starts=np.arange(trace.tokens + 1),
        pass_prefill=np.zeros(trace.tokens, np.bool_),
    )


class Early:
    """A predictor of which only the predictions made before a pass count."""

    def __init__(self, every_pass: Predictor) -> None:
        self.name, self.distance, self.width = every_pass.name, None, every_pass.width
        self.begin, self.observe, self._predict = (
            every_pass.begin,
            every_pass.observe,
            every_pass.predict,
        )

    def predict(self, layer: int) -> list[LayerPrediction]:
        return self._predict(layer) if layer < 0 else []


class Timed:
    """A predictor that is timed."""

    def __init__(self, every_pass: Predictor) -> None:
        self.name, self.distance, self.width = (
            every_pass.name,
            every_pass.distance,
            every_pass.width,
        )
        self.seconds = 0.0
        for call in ("begin", "observe", "predict"):
            setattr(self, call, self._timed(getattr(every_pass, call)))

    def _timed(self, call):
        def timed(argument):
            begin = time.perf_counter()
            result = call(argument)
            self.seconds += time.perf_counter() - begin
            return result

        return timed


def replay(it: Predictor, trace: Trace, shape: Shape) -> np.ndarray:
    """[tokens, layers, width] predictions for a trace, in the form of a recording."""
    recorder, predicted = ForecastRecorder({"it": it}, shape), []
    for at, steps in passes(trace, stream(trace, "runtime")):
        recorder.begin(at)
        for step in steps:
            recorder.layer(LayerRouting(step.layer, step.chosen))
        predicted.append(recorder.end()["it"])
    return np.concatenate(predicted)


def measure(it: Predictor, trace: Trace) -> float:
    """Accuracy of the second half of the requests: the mean over layers."""
    since = int(trace.request_starts[trace.requests // 2])
    expected = replay(it, trace, shape_of(trace))[since:, :, : trace.top_k, None]
    used = trace.experts[since:, :, None].astype(np.int64)
    return float((expected == used).any(axis=2).mean())


def row(name: str, trace: Trace) -> list[str]:
    """Accuracies at the distances, and microseconds a layer."""
    base, _, options = name.partition(":")
    setting, cells = PredictorSetup(shape_of(trace)), []
    for distance in DISTANCES:
        if PREDICTORS[base].distance is None:
            cells.append(percent(measure(predictor(name).build(setting), trace)))
            return [*cells, *["="] * (len(DISTANCES) - 1)]
        text = f"{base}:{distance}" + (f",{options}" if options else "")
        cells.append(percent(measure(predictor(text).build(setting), trace)))
    return cells


def cost(name: str, trace: Trace) -> float:
    """Microseconds a layer at the default distance, everything compiled."""
    it = Timed(predictor(name).build(PredictorSetup(shape_of(trace))))
    some = trace.head(600)
    replay(it, some.head(300), shape_of(some))
    it.seconds = 0.0
    replay(it, some, shape_of(some))
    return it.seconds / some.tokens / some.layers * 1e6


def rows_of(model: str, trace: Trace, names: list[str]) -> Iterator[list[object]]:
    """The table's rows for a recording, as they are measured."""
    singly, label = token_by_token(trace), MODELS[model].split(" (")[0]
    for name in names:
        if name == "token" and trace.token_ids is None:
            continue  # it would be popularity
        yield [label, name, *row(name, singly), cost(name, singly)]
    early = Early(predictor("routing-path").build(PredictorSetup(shape_of(trace))))
    same = ["="] * (len(DISTANCES) - 1)
    yield [label, "routing-path, early", percent(measure(early, singly)), *same, "-"]
    if trace.pass_prefill.any():
        for name in names:
            if name != "token":
                yield [MODELS[model], name, *row(name, trace), "-"]


def main(args: argparse.Namespace) -> None:
    rows = []
    for model, trace in recordings(args).items():
        for measured in rows_of(model, trace.head(limit(args)), args.predictors):
            print(*measured, flush=True)
            rows.append(measured)
    table(
        args, "prediction",
        ["recording", "predictor", *(f"d = {d}" for d in DISTANCES), "µs a layer"], rows,
    )  # fmt: skip


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument(
        "--predictors", nargs="+", default=NAMES, metavar="NAME",
        help="which, with options but without a distance, e.g. eamc:matching=request"
        " (default: %(default)s)",
    )  # fmt: skip
    parser.set_defaults(limit=8000, models=[name for name in MODELS if name != "mixtral-8x7b"])
    main(parser.parse_args())
