"""The measurement of a device, with the CPU in a GPU's place."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.core.cost import CHUNK_BYTES, Link
from greenroom.core.machine import Machine
from greenroom.plan import summary
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.measure import gpu as measure
from greenroom.runtime.measure import kernels as measure_kernels
from greenroom.runtime.measure.gpu import link_of, memory_rate, with_device
from tests.plan.models import MACHINE, MIB

BUS = 1e9  # bytes a second


class Paced(Engine):
    """Its copies take what a bus takes, pageable ones ten times as long; notes what is
    registered."""

    name = "a paced one"

    def __init__(self, refuses: str | None = None) -> None:
        self.refuses, self.pinned, self.did = refuses, False, 0

    def register(self, address: int, nbytes: int) -> str | None:
        self.pinned = self.refuses is None
        self.did += 1
        return self.refuses

    def unregister(self, address: int) -> None:
        assert self.pinned
        self.pinned = False

    @contextlib.contextmanager
    def copying(self, after: Any) -> Iterator[None]:
        yield
        time.sleep(CHUNK_BYTES / BUS * (1 if self.pinned else 10))

    def memory(self) -> tuple[int, int]:
        return 32 * MIB, 64 * MIB


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_kernels, "SHAPES", ((64, 64), (64, 128)))
    monkeypatch.setattr(measure_kernels, "DENSE", ((64, 64),))
    monkeypatch.setattr(measure_kernels, "WEIGHT_BYTES", 1 << 18)
    monkeypatch.setattr(measure_kernels, "TOKENS", (1, 4))


def test_a_link_is_that_of_pinned_memory():
    engine = Paced()
    link, measured = link_of(engine, 0.05)
    assert 0 < measured["pinned"] < BUS
    assert 0 < measured["pageable"] < BUS / 10
    assert measured["pinned"] > measured["pageable"]
    assert (link.bandwidth, link.lanes) == (measured["pinned"], measure.LANES)
    assert link.latency > 0
    assert (engine.did, engine.pinned) == (1, False)  # nothing stays registered


def test_where_memory_cannot_be_pinned_the_profile_says_why():
    link, measured = link_of(Paced("no room"), 0.02)
    assert measured["pinned"] is None
    assert measured["unpinned"] == "no room"
    assert link.bandwidth == measured["pageable"] < BUS / 10
    device = {**measured, "name": "it", "memory": 1e12, "memory_bytes": 1 << 30}
    machine = Machine(MACHINE.routes, MACHINE.processors, MACHINE.host, {"device": device})
    assert "cannot be page-locked (no room)" in " ".join(summary.machine_summary(machine))


def test_memory_is_read_and_written():
    class Slow(Paced):
        def wait(self, mark: Any) -> None:
            time.sleep(0.01)

    assert 0 < memory_rate(Slow(), 0.05) < 2 * 4 * MIB / 0.01


def test_a_profile_that_a_plan_takes(tmp_path: Path):
    measured = with_device(MACHINE, Paced(), 0.01)
    path = tmp_path / "m.json"
    path.write_text(json.dumps(measured.as_json()))
    machine = Machine.load(path)
    assert machine == measured
    assert [p.name for p in machine.processors] == ["cpu", "gpu"]
    assert machine.processors[0] == MACHINE.processors[0]  # still what a plan takes unasked
    costs = machine.costs(MIB, MIB, processor="gpu")
    assert costs.links == (MACHINE.routes[0].link, measured.routes[1].link)
    assert isinstance(costs.links[1], Link)
    assert costs.host is not None
    assert 0 < costs.expert.seconds(1) <= costs.expert.seconds(16)
    device = machine.measured["device"]
    assert (device["name"], device["memory_bytes"]) == ("a paced one", 64 * MIB)
    assert "a paced one has 64 MiB of memory" in " ".join(summary.machine_summary(machine))
