"""A loaded model whose cache can be exchanged: one load, many variants of it.

The experts are in memory (`RamStore`) behind a line of any bandwidth, or on the disk. `attach`
gives the model a new, empty cache; `warm` fills it with what a part of the recording asks for,
without computing anything, while predictors look on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from forced import Routing, batched, cut, forced, prepared
from ram_store import RamStore

import greenroom
from greenroom.core.cache.cache import compile_for
from greenroom.core.cost import Costs, Link, Work
from greenroom.core.events import Predicted
from greenroom.core.predictor import LayerRouting, PassStart, Predictor
from greenroom.core.prefetch.foresight import Foresight
from greenroom.hf.attach import attach
from greenroom.policies import choose
from greenroom.predictors import predictor as named_predictor
from greenroom.runtime.measure.bandwidth import disk_bandwidth
from greenroom.runtime.store.disk import CHUNK_BYTES
from greenroom.sim.event_driven import passes
from greenroom.sim.foresight import foresight_of
from greenroom.trace import Trace, load
from greenroom.trace.orders import stream

INFINITE = float("inf")
READERS = 2
ANY = "popularity"  # the predictor that a cache is made with, before its own takes the place
LESSONS = 40  # requests that predictors learn from, at the end of the recording
CALIBRATED = 8  # passes


class Rig:
    """One model and one recording cut to its layers; `trace` is what can be played on it."""

    def __init__(
        self, folder: Path, recording: Path, *, kernels: str = "auto", threads: int = 1
    ) -> None:
        self.model: Any = greenroom.load(
            str(folder), cache=1 << 26, kernels=kernels, threads=threads, context=1024,
            readers=READERS, prefetch="off",
        )[0]  # fmt: skip
        # without a fingerprint nothing is remembered from one cache to the next
        self.setup = replace(self.model.greenroom.setup, fingerprint="")
        self.catalog = self.setup.catalog
        layers, vocabulary = len(self.catalog.layers), self.model.config.vocab_size
        whole = prepared(load(recording), layers, vocabulary)
        self.trace = whole.select(range(whole.requests - LESSONS))  # what is played
        self.lessons = whole.select(range(whole.requests - LESSONS, whole.requests))
        self.expert_bytes = self.catalog.expert_bytes // self.catalog.experts
        self.ram = RamStore(self.catalog)
        self._learned: dict[str, Any] = {}  # what a predictor knows beforehand

    def disk(self) -> float:
        """Bytes a second of the disk, read as the store reads it."""
        files = [Path(file) for file in self.catalog.files]
        return disk_bandwidth(files, CHUNK_BYTES, READERS, direct=True, seconds=4)

    def attach(
        self, capacity: int, *, policy: str = "auto", bandwidth: float | None = INFINITE,
        prefetch: str = "off", guard: bool = False, session: Trace | None = None,
    ) -> attach.Greenroom:  # fmt: skip
        """A new, empty cache; without a bandwidth its experts come from the disk.

        A predictor sees `session`, which is what will be played, from its beginning; one that
        learns has learned from other requests of the recording.
        """
        self.model.greenroom.detach()
        chosen = choose(policy, capacity, self.catalog.experts)
        compile_for(chosen)
        parts = replace(
            self.setup, capacity=capacity, policy=chosen.name, guard=guard,
            prefetch="off" if prefetch == "off" else ANY,
        )  # fmt: skip
        store = None if bandwidth is None else self.ram
        self.ram.throttle.bandwidth = bandwidth or INFINITE
        self.model.greenroom = made = attach.Greenroom(self.model, parts, store)
        if made.driver.predictions.foresight is not None:
            assert session is not None
            made.driver.predictions.foresight = Placed(
                self.predictor(prefetch, session), self.catalog.offsets
            )
        return made

    def predictor(self, prefetch: str, session: Trace) -> Predictor:
        """One for a session. What it learns beforehand is learned once."""
        made = foresight_of(session, prefetch).predictor
        if prefetch not in self._learned:
            taught = foresight_of(self.lessons, prefetch).predictor
            if "trace" not in named_predictor(prefetch).kind.needs:
                for at, steps in passes(self.lessons, stream(self.lessons, "runtime")):
                    taught.begin(at)
                    for step in steps:
                        taught.observe(LayerRouting(step.layer, step.chosen))
            self._learned[prefetch] = taught.state()
        if self._learned[prefetch]:
            made.restore(self._learned[prefetch])
        return made

    def warm(self, trace: Trace) -> None:
        """Have the cache serve a trace, as fast as a line of memory allows, computing nothing."""
        driver, offsets = self.model.greenroom.driver, self.catalog.offsets
        with self._unpaced():
            for at, steps in passes(trace, stream(trace, "runtime")):
                # below those that the model's own passes will have: its first is a new request
                driver.begin_pass(at._replace(request=at.request - trace.requests - 1))
                for step in steps:
                    first = offsets[step.layer]
                    driver.step(
                        step.layer, step.experts - first, _nothing, step.rows, step.weights,
                        observe_routing=lambda _, step=step: LayerRouting(step.layer, step.chosen),
                    )  # fmt: skip
                driver.end_pass()

    def fill(self) -> None:
        """Have every expert in a cache that has a slot for each, or all but what it lacks."""
        driver, offsets = self.model.greenroom.driver, self.catalog.offsets
        with self._unpaced():
            for layer in range(len(offsets) - 1):
                driver.step(layer, np.arange(offsets[layer + 1] - offsets[layer]), _nothing)

    @contextmanager
    def _unpaced(self) -> Iterator[None]:
        bandwidth, self.ram.throttle.bandwidth = self.ram.throttle.bandwidth, INFINITE
        try:
            yield
        finally:
            self.ram.throttle.bandwidth = bandwidth

    def resident(self, passes: int = 24, batch: int = 1) -> tuple[float, float, float]:
        """Seconds of a pass without misses, one token of each request of a batch: (all of it, its
        experts, an expert). Medians over passes."""
        nearly = self.attach(self.catalog.experts - 1)  # see `experts_s`
        self.fill()
        together = batched(cut(self.trace, passes + 2), batch).select([0])
        with forced(self.model, together) as routing:
            routing.play(range(2))
            return experts_s(nearly, routing, range(2, passes + 2))

    def latency(self, bandwidth: float, slots: int = 8, experts: int = 24) -> float:
        """Seconds that a missing expert takes beyond its bytes' time on the line, and beyond what
        a step with one that is there takes. Slots that were never written to do not count."""
        driver = self.attach(slots, bandwidth=bandwidth).driver
        missing, there = [], []
        for expert in range(experts):
            for taken in (missing, there):
                start = time.perf_counter()
                driver.step(0, np.array([expert]), _nothing)
                taken.append(time.perf_counter() - start)
        carried = self.expert_bytes / bandwidth
        beyond = statistics.median(missing[slots:]) - statistics.median(there[slots:])
        return max(0.0, beyond - carried)

    def costs(self, bandwidth: float, token_s: float, experts_s: float, expert_s: float) -> Costs:
        """The cost model of this rig; times as `resident` gives them."""
        layers = len(self.catalog.layers)
        link = Link(bandwidth, self.latency(bandwidth), READERS)
        return Costs(
            (link,), Work.constant(expert_s), Work.constant((token_s - experts_s) / layers)
        )


def experts_s(
    made: attach.Greenroom, routing: Routing, passes: range
) -> tuple[float, float, float]:
    """Medians over passes of a token: seconds of all of it, of its experts, and of an expert.

    A cache with a slot for every expert computes whole layers as one, in which experts have no time
    of their own: the cache must have at least one slot less.
    """
    assert made.capacity < made.setup.catalog.experts
    seconds, of_experts, of_one = [], [], []
    for number in passes:
        computed, before = made.driver.meter.computed_s, made.stats().expert_requests
        seconds += routing.play(range(number, number + 1))
        of_experts.append(made.driver.meter.computed_s - computed)
        of_one.append(of_experts[-1] / (made.stats().expert_requests - before))
    return statistics.median(seconds), statistics.median(of_experts), statistics.median(of_one)


class Placed(Foresight):
    """Foresight that is told where in the recording a pass begins, also after a `warm`."""

    place = 0

    def begin(self, at: PassStart) -> list[Predicted]:
        at = at._replace(first=self.place)
        self.place += at.tokens
        return super().begin(at)


def _nothing(experts: Any, slots: Any) -> None:
    """Computes no group."""


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that every script of this folder has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path, help="what checkpoint.py made: bench-data/olmoe-8")
    parser.add_argument("trace", type=Path, help="a recording: olmoe-1b-7b.npz")
    parser.add_argument("--kernels", default="auto", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="that compute: default %(default)s")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--out", type=Path, help="append every run to this file, as JSON lines")
    return parser


__all__ = ["INFINITE", "READERS", "Rig", "Routing", "arguments", "cut", "forced"]
