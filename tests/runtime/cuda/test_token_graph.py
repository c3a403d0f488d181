"""A token's graph: the order of its launches, and counts after interrupts; stubs take the place
of the experts' launches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from greenroom.errors import DeviceError
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.token_graph import NoGraph, TokenGraph

LAYERS, TOP_K = 3, 2


class Launches:
    """A layer's launches, which report that all experts are in slots; `did` is of all layers."""

    def __init__(self, report: torch.Tensor, did: list[str]) -> None:
        self.report, self.number, self.did, self.expert = report, 0, did, 7

    def run(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        self.number += 1
        self.report[:] = self.number << 32 | self.expert << 1 | 1
        self.did.append("run")
        return x

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        self.did.append("order")
        yield

    def set_count(self, number: int) -> None:
        self.number = number


class Rig:
    def __init__(self) -> None:
        self.did, self.interrupted_at = list[str](), LAYERS
        hidden = torch.zeros(1, 1, 4)
        self.graph = TokenGraph(Engine(), LAYERS, LAYERS, TOP_K, 8, hidden, None)

    def decode(self) -> torch.Tensor:
        x = torch.ones(1, 4)
        for layer in range(LAYERS):
            if layer == self.interrupted_at:
                raise KeyboardInterrupt
            make = lambda report: Launches(report, self.did)  # noqa: E731
            x = self.graph.launch_experts(layer, make, x, x, x)
        return x[None]

    def reports_of_experts(self) -> list[list[int]]:
        return self.graph.chosen.tolist()

    def reports(self) -> list[list[int]]:
        assert self.graph.read_reports()
        return self.reports_of_experts()


def test_a_replay_is_in_order_with_changes_of_slots():
    rig = Rig()
    rig.graph.compute(rig.decode)
    rig.did.clear()
    rig.graph.replay(rig.decode)
    assert rig.did == ["order", *["run"] * LAYERS]


def test_the_first_launches_of_a_layer_are_in_order():
    """Torch may give pinned memory to others when an error of a later layer has freed it."""
    rig = Rig()
    rig.interrupted_at = LAYERS - 1
    with pytest.raises(KeyboardInterrupt):
        rig.graph.compute(rig.decode)
    assert rig.did == ["order", "run"] * (LAYERS - 1)


def test_a_capture_has_the_lock_of_the_table_first(monkeypatch):
    """A layer's capture has it too; in another order two threads would wait for each other."""
    rig = Rig()
    rig.graph.compute(rig.decode)
    rig.did.clear()

    def capture(engine: Engine, work: Any) -> Any:
        rig.did.append("capture")
        return work

    monkeypatch.setattr(Engine, "capture", capture)
    rig.graph.replay(rig.decode)
    assert rig.did[:2] == ["order", "capture"]


def test_an_expert_that_is_missing_is_reported():
    rig = Rig()
    rig.graph.compute(rig.decode)
    assert rig.graph.read_reports()
    rig.graph._reports[3] -= 1
    assert not rig.graph.read_reports()
    assert rig.reports_of_experts() == [[7] * TOP_K] * LAYERS


def test_reports_of_an_earlier_pass_are_waited_for(monkeypatch):
    """Each of them, also if the others are there."""
    rig = Rig()
    for number in range(1, 9):
        rig.graph.compute(rig.decode)
        assert rig.graph.read_reports()
        with monkeypatch.context() as patch:
            rig.graph._reports[number % 6] -= 1 << 32
            patch.setattr(Engine, "is_idle", lambda *_: True)
            with pytest.raises(DeviceError, match="has not reported"):
                rig.graph.read_reports()


@pytest.mark.parametrize("at", range(LAYERS))
def test_a_pass_that_was_interrupted_does_not_spoil_later_ones(at):
    """An interrupted pass has launched the look-ups of some layers."""
    rig = Rig()
    rig.graph.compute(rig.decode)
    for _ in range(2):
        rig.interrupted_at = at
        with pytest.raises(KeyboardInterrupt):
            rig.graph.replay(rig.decode)
        rig.interrupted_at = LAYERS
        rig.graph.replay(rig.decode)
        assert rig.reports() == [[7] * TOP_K] * LAYERS


def test_a_pass_that_a_device_cannot_capture_is_no_graph(monkeypatch):
    """Else every token would run kernel by kernel, in place of graphs of single layers."""
    rig = Rig()
    rig.graph.compute(rig.decode)
    monkeypatch.setattr(Engine, "makes_graphs", True)
    with pytest.raises(NoGraph, match="could not be captured"):
        rig.graph.replay(rig.decode)
