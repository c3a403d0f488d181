"""The demo model's recordings and ProMoE's systems on a simulated machine, for its figures.

The machine is made up: a layer computes for 1 ms, half of it in its experts (as in
`moepic_motivation.py`). A prompt of 32 tokens computes each expert as long as one token does: its
weights are read once. The link follows from the paper: reactive LRU with half of the experts blocks
60.4 % of the decode time in transformers (figure 3), and 79.0 % in llama.cpp (figure 4). An expert
is three chunks, its three matrices (5.1), and the link carries one chunk at a time.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from greenroom.core.config.scheduler import SchedulerConfig
from greenroom.core.cost import Costs, Link, Work
from greenroom.errors import UsageError
from greenroom.policies import policy
from greenroom.sim.event_driven import EventOptions, EventRun, simulate_events
from greenroom.trace import Trace, load, stream
from greenroom.trace.trace import Prediction, starts_of

DISTANCES = (1, 2, 4)
PROMPT, DECODED = 32, 32  # tokens of a request
EXPERT = 61_440  # bytes, divisible by three
LAYER = 1e-3  # seconds of computing, half of them in the experts
BLOCKED = {"transformers": 0.604, "llama.cpp": 0.790}  # of decode time: figures 3 and 4
COLOURS = {"static": "#009e73", "lru": "#0072b2", "promoe": "#d55e00"}
BUFFERS = 2  # of the static cache, for missing experts


@dataclass(frozen=True)
class System:
    """A system as the paper's evaluation has it (7.1), or one step of its ablation.

    order:     resident, cached, id or access (`--expert-order`)
    chunks:    of an expert
    predictor: as `--prefetch` names it, or off
    distance:  which recording's predictions are replayed
    static:    the most used experts of earlier requests stay, others pass through two buffers
    """

    order: str = "access"
    chunks: int = 1
    predictor: str = "off"
    distance: int = 1
    static: bool = False


LRU, STATIC = System(), System(static=True)


def proactive(predictor: str, distance: int) -> System:
    """ProMoE's prefetcher with all of its techniques, and one of several predictors."""
    return System("cached", 3, predictor, distance)


class Demo:
    """Recordings of the demo model: requests to simulate, and earlier ones to learn from."""

    def __init__(self, folder: Path, quick: bool, requests: int | None = None) -> None:
        traces = {k: load(folder / f"k{k}.trace") for k in DISTANCES}
        long = np.flatnonzero(np.diff(traces[1].request_starts) >= PROMPT + DECODED)
        if requests is None:
            requests = 2 if quick else long.size
        self.whole = traces
        self.timed = {k: shaped(trace.select(long[:requests])) for k, trace in traces.items()}
        self.earlier = load(folder / "earlier.trace")

    def trace(self, distance: int, predictor: str) -> Trace:
        """The recording with predictions for a distance; `perfect` ones are the routing."""
        trace = self.timed[distance]
        if predictor != "perfect":
            return trace
        return replace(trace, predictions={"learned": Prediction(trace.experts, distance)})


def shaped(trace: Trace) -> Trace:
    """Requests of a prompt, one pass of the first 32 tokens, and 32 tokens of an answer."""
    starts, tokens = trace.request_starts[:-1], PROMPT + DECODED
    rows = np.concatenate([np.arange(start, start + tokens) for start in starts])
    passes = np.tile([PROMPT, *[1] * DECODED], trace.requests)
    return replace(
        trace,
        experts=trace.experts[rows],
        token_ids=None if trace.token_ids is None else trace.token_ids[rows],
        predictions={
            name: replace(each, experts=each.experts[rows])
            for name, each in trace.predictions.items()
        },
        request_starts=np.arange(trace.requests + 1) * tokens,
        pass_starts=starts_of(passes),
        pass_prefill=passes == PROMPT,
    )


@dataclass(frozen=True)
class Measured:
    """Means over requests, without the first one, which fills the cache.

    ttft, tpot:  seconds
    prompt_wait: share of the prompts' time in which the processor waits for experts
    token_wait:  the same of decoded tokens
    run:         the simulation
    """

    ttft: float
    tpot: float
    prompt_wait: float
    token_wait: float
    run: EventRun


class Bench:
    """The systems on one machine; equal cells are simulated once."""

    def __init__(self, demo: Demo, machine: str) -> None:
        self.demo, self.experts = demo, int(demo.earlier.offsets[-1])
        self.transfer = 1e-3  # seconds for an expert
        self.measure = cache(self._measure)
        wait = self.measure(LRU, 0.5).tpot - LAYER * demo.earlier.layers
        share = BLOCKED[machine]
        computing = LAYER * demo.earlier.layers
        self.transfer *= share / (1 - share) * computing / wait
        self.measure.cache_clear()

    def costs(self, factor: float) -> Costs:
        """The machine, with transfers that take `factor` times as long."""
        expert = LAYER / 2 / self.demo.earlier.top_k
        link = Link(EXPERT / (self.transfer * factor), lanes=1)
        return Costs((link,), Work.constant(expert), Work.constant(LAYER / 2))

    def static_set(self, slots: int) -> tuple[int, ...]:
        """The most used experts of earlier requests, as many in each layer."""
        uses, offsets = self.demo.earlier.uses(), self.demo.earlier.offsets
        each, chosen = slots // self.demo.earlier.layers, list[int]()
        for first, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            best = np.argsort(-uses[first:end], kind="stable")[:each]
            chosen += (first + best).tolist()
        return tuple(sorted(chosen))

    def _measure(self, system: System, share: float, factor: float = 1.0) -> Measured:
        slots = int(share * self.experts)
        trace = self.demo.trace(system.distance, system.predictor)
        options: dict[str, Any] = {"scope": "per-layer"}
        if system.static:
            options = {"stay": self.static_set(slots)}
            slots += BUFFERS
        if system.predictor == "token":
            options["history"] = self.demo.earlier
        config = SchedulerConfig(expert_order=system.order, prefetch_rule="top-k")
        name = {
            "perfect": "learned", "next-gate": f"next-gate:{system.distance}"
        }.get(system.predictor, system.predictor)  # fmt: skip
        run = simulate_events(
            trace, stream(trace, "runtime"), slots, policy("lru"), self.costs(factor), EXPERT,
            name, EventOptions(config=config, chunk_bytes=EXPERT // system.chunks, **options),
        )  # fmt: skip
        return self._means(trace, run)

    def _means(self, trace: Trace, run: EventRun) -> Measured:
        """Means over all requests but the first, and the shares of waiting."""
        computing = pass_seconds(trace)
        ttft, gaps = run.times.ttft[1:], run.times.gaps
        first = int((trace.pass_requests == 0).sum()) - 1
        prompts = computing[trace.pass_prefill][1:]
        tokens = computing[~trace.pass_prefill][first:]
        gaps = gaps[first:]
        return Measured(
            float(ttft.mean()), float(gaps.mean()), 1 - float(prompts.sum() / ttft.sum()),
            1 - float(tokens.sum() / gaps.sum()), run,
        )  # fmt: skip


def pass_seconds(trace: Trace) -> np.ndarray:
    """Computing time of each pass."""
    requests = stream(trace, "runtime")
    used = np.bincount(requests.token, np.diff(requests.starts), minlength=trace.passes)
    return LAYER / 2 * trace.layers + used * (LAYER / 2 / trace.top_k)


def demo_of(args: argparse.Namespace, requests: int | None = None) -> Demo:
    """The recordings that a script's options name; UsageError where there are none."""
    if not (args.demo / "earlier.trace").is_file():
        raise UsageError(f"--demo {args.demo}: no recordings there: make them with promoe_train.py")
    return Demo(args.demo, args.quick, requests)


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the demo model's recordings."""
    parser.add_argument(
        "--demo", type=Path, default=Path(__file__).parent / "demo", metavar="DIR",
        help="recordings of promoe_train.py (default: those of the repository)",
    )  # fmt: skip
