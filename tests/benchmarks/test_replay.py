"""A replay measures the time of experts."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import harness


def replay_module(name: str) -> Any:
    """A module of `benchmarks/replay`, whose folder is no package."""
    with harness.as_program(harness.FOLDER / "replay" / f"{name}.py", []):
        return importlib.import_module(name)


@pytest.mark.bench_smoke
def test_experts_take_a_part_of_the_time_of_a_token(inputs: dict[str, Path]) -> None:
    rig = replay_module("rig").Rig(Path("demo"), inputs["recording"])
    token, experts, one = rig.resident(passes=4)
    assert 0 < one < experts < token
    rig.model.greenroom.detach()
