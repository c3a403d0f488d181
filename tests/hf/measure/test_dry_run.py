"""A small random model tells what a machine's matrices alone do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from greenroom.hf.measure import dry_run
from greenroom.hf.measure.dry_run import Case, Shape, with_dry_run
from greenroom.hf.measure.harness import Measurement
from tests.plan.models import MACHINE


def test_a_rehearsal_tells_what_matrices_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shape = Shape(hidden=64, inner=64, layers=2, experts=8, top_k=2, vocabulary=64)
    monkeypatch.setattr(dry_run, "SMALLEST", shape)
    found = with_dry_run(MACHINE, tmp_path, shape).processors[0]
    assert found.layer >= 0
    assert found.fetch >= 0
    assert found.copy >= 0
    assert found.wake >= 0
    assert found.expert.at(1 << 20).seconds(1) <= MACHINE.processors[0].expert.at(1 << 20).seconds(
        1
    )
    assert list(tmp_path.iterdir()) == []  # the model is gone


def test_every_processor_has_a_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On the fake device in a GPU's place; each says what it takes beyond its own matrices."""
    shape = Shape(hidden=64, inner=64, layers=2, experts=8, top_k=2, vocabulary=64)
    monkeypatch.setattr(dry_run, "SMALLEST", shape)
    known, asked = dry_run.measure, []

    def measure(model: str, shape: Shape, device: str, *cases: list[Case]) -> list[Measurement]:
        asked.append(device)
        return known(model, shape, device, *cases)

    monkeypatch.setattr(dry_run, "measure", measure)
    (cpu,) = MACHINE.processors
    gpu = replace(cpu, name="gpu", memory="device")
    both = replace(MACHINE, processors=(cpu, gpu))
    found = with_dry_run(both, tmp_path, shape, {"host": "cpu", "device": "fake"})
    assert asked == ["cpu", "cpu", "fake", "fake"]
    assert [each.name for each in found.processors] == ["cpu", "gpu"]
    assert found.processors != both.processors
    assert list(tmp_path.iterdir()) == []


def test_what_waits_cost_is_told_by_two_runs_that_wait():
    """Ten tokens with three misses each: waits of 1 ms against 2 ms; of longer ones 4 ms count."""

    def ran(wait: float, compute_seconds: float) -> Measurement:
        stall = 10 * 3 * wait
        gaps = (compute_seconds + 3 * wait,) * 10
        return Measurement((0.1,), gaps, ((1,),), 80, 30, 0, stall, 0.0)

    short, long = ran(1e-3, 0.010), ran(2e-3, 0.0106)
    assert dry_run.wait_seconds(long) == pytest.approx(6e-3)
    assert dry_run.wake_cost(short, long) == pytest.approx(0.2)
    assert dry_run.wake_cost(long, short) == 0
    assert dry_run.wake_cost(short, ran(1.0, 0.0118)) == pytest.approx(0.2)
    assert dry_run.wake_cost(short, ran(2e-3, 0.009)) == 0
