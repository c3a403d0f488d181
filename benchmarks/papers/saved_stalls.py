"""Accuracy of every predictor by distance and layer, and the stalls that it saves in simulations.

    python benchmarks/papers/saved_stalls.py --traces DIR [--share 0.25]

The machine is that of promoe_bench.py: a link on which reactive LRU blocks 60.4 % of decode. The
cache has --share of the experts and the default policy; prefetches are chosen by the value rule. On
the demo model's held-out requests, next-gate and the trained networks are replayed as recorded. On
the recordings of --models (their first --limit tokens, each a decode pass), predictors have routing
alone. On the demo model, policy and predictors from routing have seen earlier requests. There are
no recorded predictions of these: with them the policy is "untaught". On recordings everything
begins with nothing.

    saved = (stalls without prefetching - stalls) / (the same with the best oracle)

The oracle looks into the trace; of its distances the one that saves most counts. Accuracy is the
share of the experts used that were among the top-k predicted, for each quarter of the layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from common import MODELS, limit, options, percent, table
from prediction import replay, shape_of, token_by_token
from promoe_bench import EXPERT, Bench, add_demo, demo_of

from greenroom.core.cost import Costs
from greenroom.policies import policy
from greenroom.predictors import PREDICTORS, PredictorSetup, predictor
from greenroom.sim.event_driven import EventOptions, simulate_events
from greenroom.trace import Trace, load, stream

DISTANCES = (1, 2, 4, 8)
RECORDED = ("next-gate", "learned")
ROUTING = ("popularity", "token", "markov", "eamc", "routing-path")
QUARTERS = 4


@dataclass(frozen=True)
class Case:
    """A recording, its machine, and an earlier one that predictors have learned from."""

    label: str
    trace: Trace
    costs: Costs
    capacity: int
    earlier: Trace | None = None

    def stall(self, name: str) -> float:
        """Simulate a predictor; return the seconds in which the processor waits for experts."""
        chosen = EventOptions(chunk_bytes=EXPERT // 3, history=self.earlier)
        run = simulate_events(
            self.trace, stream(self.trace, "runtime"), self.capacity, policy("auto"), self.costs,
            EXPERT, name, chosen,
        )  # fmt: skip
        return run.times.stall


def by_quarter(trace: Trace, predicted: np.ndarray) -> list[str]:
    """Accuracy of all layers, and of each quarter of them."""
    top = predicted[:, :, : trace.top_k, None].astype(np.int64)
    layers = (top == trace.experts[:, :, None, :]).any(axis=2).mean(axis=(0, 2))
    return [percent(layers.mean()), *(percent(q.mean()) for q in np.array_split(layers, QUARTERS))]


def routing_names(trace: Trace) -> Iterator[str]:
    """Names of the predictors from routing alone, with each distance where they have one."""
    for name in ROUTING:
        if "token_ids" in PREDICTORS[name].needs and trace.token_ids is None:
            continue
        if PREDICTORS[name].distance is None:
            yield name
        else:
            yield from (f"{name}:{distance}" for distance in DISTANCES if distance < trace.layers)


def bounds(case: Case) -> tuple[float, float]:
    """Simulate a case without prefetching, and with the best oracle; return the stalls."""
    distances = [distance for distance in DISTANCES if distance < case.trace.layers]
    return case.stall("off"), min(case.stall(f"oracle:{distance}") for distance in distances)


def rows_of(case: Case, recorded: dict[str, Trace]) -> Iterator[list[str]]:
    """A case's rows: a name, accuracies, seconds of stalls, and the share of the oracle's."""

    def row(name: str, accuracy: list[str], stall: float, ends: tuple[float, float]) -> list[str]:
        without, best = ends
        saved = (without - stall) / (without - best) if best < without else 0.0
        return [case.label, name, *accuracy, f"{stall:.3f}", percent(saved)]

    known = ["-"] * (QUARTERS + 1)
    if recorded:
        untaught = replace(case, earlier=None)
        ends = bounds(untaught)
        yield row("off, untaught", known, ends[0], ends)
        yield row("oracle, untaught", known, ends[1], ends)
        for name, trace in recorded.items():
            kind = name.partition(":")[0]
            stall = replace(untaught, trace=trace).stall("learned" if kind == "learned" else name)
            yield row(name, by_quarter(trace, trace.predictions[kind].experts), stall, ends)
    ends = bounds(case)
    yield row("off", known, ends[0], ends)
    yield row("oracle", known, ends[1], ends)
    for name in routing_names(case.trace):
        it = predictor(name).build(PredictorSetup(shape_of(case.trace)))
        if case.earlier is not None:
            replay(it, case.earlier, shape_of(case.trace))
        predicted = replay(it, case.trace, shape_of(case.trace))
        yield row(name, by_quarter(case.trace, predicted), case.stall(name), ends)


def main(args: argparse.Namespace) -> None:
    demo = demo_of(args)
    costs = Bench(demo, "transformers").costs(1.0)
    traces = demo.timed
    recorded = {f"{name}:{k}": trace for name in RECORDED for k, trace in traces.items()}
    slots = int(args.share * demo.earlier.offsets[-1])
    cases = [(Case("demo", traces[1], costs, slots, demo.earlier), recorded)]
    for model in args.models:
        trace = token_by_token(load(Path(args.traces) / f"{model}.npz").head(limit(args)))
        label = MODELS[model].split(" (")[0]
        cases.append((Case(label, trace, costs, int(args.share * trace.offsets[-1])), {}))
    rows = []
    for case, predictions in cases:
        for each in rows_of(case, predictions):
            print(*each, flush=True)
            rows.append(each)
    quarters = ["accuracy", "first quarter", "second", "third", "last"]
    header = ["recording", "predictor", *quarters, "stalls, s", "saved, of the oracle's"]
    table(args, "saved-stalls", header, rows)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.set_defaults(limit=1500, models=["olmoe-1b-7b", "deepseek-v2-lite", "gpt-oss-20b"])
    parser.add_argument("--share", type=float, default=0.25, help="of the experts in the cache")
    add_demo(parser)
    main(parser.parse_args())
