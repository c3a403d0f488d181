"""A small random model tells what a machine's matrices alone do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from greenroom.hf.measure import dry_run
from greenroom.hf.measure.dry_run import Case, Shape, with_dry_run
from greenroom.hf.measure.harness import Measurement
from tests.plan.models import MACHINE


def test_a_dry_run_measures_costs_besides_matrices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shape = Shape(hidden=64, inner=64, layers=2, experts=8, top_k=2, vocabulary=64)
    monkeypatch.setattr(dry_run, "SMALLEST", shape)
    measured = with_dry_run(MACHINE, tmp_path, shape).processors[0]
    assert measured.layer >= 0
    assert measured.fetch >= 0
    assert measured.copy >= 0
    assert measured.wake >= 0
    assert measured.expert.at(1 << 20).seconds(1) <= MACHINE.processors[0].expert.at(
        1 << 20
    ).seconds(1)
    assert list(tmp_path.iterdir()) == []  # the model is gone


def test_every_processor_has_a_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The fake device stands in a GPU's place; each device has its own measured costs."""
    shape = Shape(hidden=64, inner=64, layers=2, experts=8, top_k=2, vocabulary=64)
    monkeypatch.setattr(dry_run, "SMALLEST", shape)
    original, devices = dry_run.measure, []

    def measure(model: str, shape: Shape, device: str, *cases: list[Case]) -> list[Measurement]:
        devices.append(device)
        return original(model, shape, device, *cases)

    monkeypatch.setattr(dry_run, "measure", measure)
    (cpu,) = MACHINE.processors
    gpu = replace(cpu, name="gpu", memory="device")
    both = replace(MACHINE, processors=(cpu, gpu))
    measured = with_dry_run(both, tmp_path, shape, {"host": "cpu", "device": "fake"})
    assert devices == ["cpu", "cpu", "fake", "fake"]
    assert [each.name for each in measured.processors] == ["cpu", "gpu"]
    assert measured.processors != both.processors
    assert list(tmp_path.iterdir()) == []


def test_the_cost_of_waits_is_computed_from_two_runs():
    """Ten tokens with three misses each: waits of 1 ms against 2 ms; of longer ones 4 ms count."""

    def measurement(wait: float, compute_seconds: float) -> Measurement:
        stall = 10 * 3 * wait
        gaps = (compute_seconds + 3 * wait,) * 10
        return Measurement((0.1,), gaps, ((1,),), 80, 30, 0, stall, 0.0)

    short, long = measurement(1e-3, 0.010), measurement(2e-3, 0.0106)
    assert dry_run.wait_seconds(long) == pytest.approx(6e-3)
    assert dry_run.wake_cost(short, long) == pytest.approx(0.2)
    assert dry_run.wake_cost(long, short) == 0
    assert dry_run.wake_cost(short, measurement(1.0, 0.0118)) == pytest.approx(0.2)
    assert dry_run.wake_cost(short, measurement(2e-3, 0.009)) == 0
