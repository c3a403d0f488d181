"""A loaded model whose cache can be exchanged: one load, many variants of it.

The experts are in memory (`RamStore`) behind a throttled link, or on the disk. `attach`
gives the model a new, empty cache; `warm` fills it with the experts of a part of the recording
without computing anything; predictors observe the routing.
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
    """A model, and a recording cut to its layers; `trace` is the part for replays."""

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
        all_layers = prepared(load(recording), layers, vocabulary)
        self.trace = all_layers.select(range(all_layers.requests - LESSONS))  # what is played
        self.lessons = all_layers.select(range(all_layers.requests - LESSONS, all_layers.requests))
        self.expert_bytes = self.catalog.all_experts_bytes // self.catalog.experts
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

        A predictor observes `session`, the requests to be played, from its beginning; one that
        learns was trained on other requests of the recording.
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
        self.model.greenroom = attached = attach.Greenroom(self.model, parts, store)
        if attached.driver.predictions.foresight is not None:
            assert session is not None
            attached.driver.predictions.foresight = Placed(
                self.predictor(prefetch, session), self.catalog.offsets
            )
        return attached

    def predictor(self, prefetch: str, session: Trace) -> Predictor:
        """A predictor for a session; its training is done once and restored afterwards."""
        learner = foresight_of(session, prefetch).predictor
        if prefetch not in self._learned:
            taught = foresight_of(self.lessons, prefetch).predictor
            if "trace" not in named_predictor(prefetch).kind.needs:
                for at, steps in passes(self.lessons, stream(self.lessons, "runtime")):
                    taught.begin(at)
                    for step in steps:
                        taught.observe(LayerRouting(step.layer, step.chosen))
            self._learned[prefetch] = taught.state()
        if self._learned[prefetch]:
            learner.restore(self._learned[prefetch])
        return learner

    def warm(self, trace: Trace) -> None:
        """Serve a trace from the cache at memory speed, without computing."""
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
        """Load every expert into the cache, or as many as it has slots."""
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
        """Median seconds of a decode pass without misses: (the pass, its experts, one expert).

        A pass has one token of each request of a batch.
        """
        nearly = self.attach(self.catalog.experts - 1)  # see `experts_s`
        self.fill()
        batches = batched(cut(self.trace, passes + 2), batch).select([0])
        with forced(self.model, batches) as routing:
            routing.play(range(2))
            return experts_s(nearly, routing, range(2, passes + 2))

    def latency(self, bandwidth: float, slots: int = 8, experts: int = 24) -> float:
        """Seconds of a missing expert beyond its transfer time and a step without misses.

        The transfer time is its bytes over the link's bandwidth. Slots that were never written to
        do not count.
        """
        driver = self.attach(slots, bandwidth=bandwidth).driver
        missing, present = [], []
        for expert in range(experts):
            for side in (missing, present):
                start = time.perf_counter()
                driver.step(0, np.array([expert]), _nothing)
                side.append(time.perf_counter() - start)
        carried = self.expert_bytes / bandwidth
        beyond = statistics.median(missing[slots:]) - statistics.median(present[slots:])
        return max(0.0, beyond - carried)

    def costs(self, bandwidth: float, token_s: float, experts_s: float, expert_s: float) -> Costs:
        """The cost model of this rig; times as `resident` gives them."""
        layers = len(self.catalog.layers)
        link = Link(bandwidth, self.latency(bandwidth), READERS)
        return Costs(
            (link,), Work.constant(expert_s), Work.constant((token_s - experts_s) / layers)
        )


def experts_s(
    attached: attach.Greenroom, routing: Routing, passes: range
) -> tuple[float, float, float]:
    """Median seconds of a decode pass: (the pass, its experts, one expert).

    A cache with a slot for every expert computes a layer as one, in which single experts are not
    timed: the cache must have at least one slot less.
    """
    assert attached.capacity < attached.setup.catalog.experts
    seconds, of_experts, of_one = [], [], []
    for number in passes:
        computed, before = attached.driver.meter.computed_s, attached.stats().expert_requests
        seconds += routing.play(range(number, number + 1))
        of_experts.append(attached.driver.meter.computed_s - computed)
        of_one.append(of_experts[-1] / (attached.stats().expert_requests - before))
    return statistics.median(seconds), statistics.median(of_experts), statistics.median(of_one)


class Placed(Foresight):
    """A predictor with foresight that knows each pass's position in the recording."""

    place = 0

    def begin(self, at: PassStart) -> list[Predicted]:
        at = at._replace(first=self.place)
        self.place += at.tokens
        return super().begin(at)


def _nothing(experts: Any, slots: Any) -> None:
    """Compute no group."""


def arguments(description: str) -> argparse.ArgumentParser:
    """The shared options of this folder's scripts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path, help="what checkpoint.py made: bench-data/olmoe-8")
    parser.add_argument("trace", type=Path, help="a recording: olmoe-1b-7b.npz")
    parser.add_argument("--kernels", default="auto", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="that compute: default %(default)s")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--out", type=Path, help="append every run to this file, as JSON lines")
    return parser


__all__ = ["INFINITE", "READERS", "Rig", "Routing", "arguments", "cut", "forced"]
