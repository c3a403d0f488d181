"""A loaded model whose cache can be exchanged: one load, many variants of it.

The experts are in memory (`RamStore`) behind a line of any bandwidth, or on the disk. `attach`
gives the model a new, empty cache; `warm` fills it with what a part of the recording asks for,
without computing anything.
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
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from forced import Routing, cut, forced, prepared

import greenroom
from greenroom.core.cache import compile_for
from greenroom.core.cost import Costs, Link, Work
from greenroom.hf import attach
from greenroom.policies import choose
from greenroom.runtime.measure import disk_bandwidth
from greenroom.runtime.ram import RamStore
from greenroom.runtime.store import CHUNK_BYTES
from greenroom.trace import Trace, load
from greenroom.trace.orders import stream

INFINITE = float("inf")
READERS = 2
CALIBRATED = 8  # passes


class Rig:
    """One model and one recording cut to its layers; `trace` is what can be played on it."""

    def __init__(
        self, folder: Path, recording: Path, *, kernels: str = "auto", threads: int = 1
    ) -> None:
        self.model: Any = greenroom.load(
            str(folder), cache=1 << 26, kernels=kernels, threads=threads, context=1024,
            readers=READERS,
        )[0]  # fmt: skip
        self.parts: attach.Parts = self.model.greenroom.parts
        self.catalog = self.parts.catalog
        layers, vocabulary = len(self.catalog.layers), self.model.config.vocab_size
        self.trace: Trace = prepared(load(recording), layers, vocabulary)
        self.expert_bytes = self.catalog.expert_bytes // self.catalog.experts
        self.ram = RamStore(self.catalog)

    def disk(self) -> float:
        """Bytes a second of the disk, read as the store reads it."""
        files = [Path(file) for file in self.catalog.files]
        return disk_bandwidth(files, CHUNK_BYTES, READERS, direct=True, seconds=4)

    def attach(
        self, capacity: int, *, policy: str = "auto", bandwidth: float | None = INFINITE,
        **options: Any,
    ) -> attach.Greenroom:  # fmt: skip
        """A new, empty cache; without a bandwidth its experts come from the disk.

        `options` are further fields of `Parts`.
        """
        self.model.greenroom.detach()
        chosen = choose(policy, capacity, self.catalog.experts)
        compile_for(chosen)
        parts = replace(self.parts, capacity=capacity, policy=chosen.name, **options)
        if bandwidth is None:
            self.model.greenroom = attach.Greenroom(self.model, parts)
        else:
            self.ram.line.bandwidth = bandwidth
            with mock.patch.object(attach, "DiskStore", return_value=self.ram):
                self.model.greenroom = attach.Greenroom(self.model, parts)
        return self.model.greenroom

    def warm(self, trace: Trace) -> None:
        """Have the cache serve a trace, as fast as a line of memory allows, computing nothing."""
        requests, before = stream(trace, "runtime"), -1
        driver, offsets = self.model.greenroom.driver, self.catalog.offsets
        with self._unpaced():
            for step, layer in enumerate(requests.layer.tolist()):
                if (request := int(requests.request[step])) != before:
                    driver.begin_request()
                    before = request
                part = slice(*requests.starts[step : step + 2].tolist())
                experts = requests.pieces[part].astype(np.int64) - offsets[layer]
                rows = (
                    requests.rows[part] if requests.rows.size else np.ones(experts.size, np.int32)
                )
                driver.step(layer, experts, _nothing, rows, requests.weights[part])

    def fill(self) -> None:
        """Have every expert in a cache that has a slot for each."""
        driver, offsets = self.model.greenroom.driver, self.catalog.offsets
        with self._unpaced():
            for layer in range(len(offsets) - 1):
                driver.step(layer, np.arange(offsets[layer + 1] - offsets[layer]), _nothing)

    @contextmanager
    def _unpaced(self) -> Iterator[None]:
        bandwidth, self.ram.line.bandwidth = self.ram.line.bandwidth, INFINITE
        try:
            yield
        finally:
            self.ram.line.bandwidth = bandwidth

    def resident(self, passes: int = 24) -> tuple[float, float, float]:
        """Seconds of a one-token pass with everything resident: (all of it, its experts, an
        expert). Medians over passes; leaves a cache that has every expert."""
        whole = self.attach(self.catalog.experts)
        self.fill()
        spent = [0.0, 0]
        wave = whole.kernel.wave

        def timed(step: Any, experts: Any, slots: Any) -> None:
            start = time.perf_counter()
            wave(step, experts, slots)
            spent[0] += time.perf_counter() - start
            spent[1] += len(experts)

        seconds, of_experts = [], []
        with forced(self.model, cut(self.trace, passes + 2).select([0])) as routing:
            routing.play(range(2))
            whole.kernel.wave = timed
            try:
                for number in range(2, passes + 2):
                    spent[:] = 0.0, 0
                    seconds += routing.play(range(number, number + 1))
                    of_experts.append(spent[0])
            finally:
                del whole.kernel.wave
        experts = statistics.median(of_experts)
        return statistics.median(seconds), experts, experts / spent[1]

    def latency(self, bandwidth: float, experts: int = 12) -> float:
        """Seconds that a missing expert takes beyond its bytes' time on the line."""
        whole, taken = self.attach(self.catalog.experts, bandwidth=bandwidth), []
        for expert in range(experts):
            start = time.perf_counter()
            whole.driver.step(0, np.array([expert]), _nothing)
            taken.append(time.perf_counter() - start)
        return max(0.0, statistics.median(taken) - self.expert_bytes / bandwidth)

    def costs(self, bandwidth: float, token_s: float, experts_s: float, expert_s: float) -> Costs:
        """The cost model of this rig; times as `resident` gives them."""
        layers = len(self.catalog.layers)
        link = Link(bandwidth, self.latency(bandwidth), READERS)
        return Costs(
            (link,), Work.constant(expert_s), Work.constant((token_s - experts_s) / layers)
        )


def _nothing(experts: Any, slots: Any) -> None:
    """Computes no wave."""


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
