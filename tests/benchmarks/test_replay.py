"""Variants of the ablation schedule as named, and a replay measures the time of experts."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from greenroom.core.events import Computed, ComputeGroup, Finish, Landed, Routed, StartChunk
from greenroom.core.pieces import Pieces
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.policies import policy
from tests.benchmarks import harness

RESIDENT, STEP = [1, 3], [0, 1, 2, 3, 4]  # of a step of five experts two are there


def replay_module(name: str) -> Any:
    """A module of `benchmarks/replay`, whose folder is no package."""
    with harness.as_program(harness.FOLDER / "replay" / f"{name}.py", []):
        return importlib.import_module(name)


def play(scheduler: Scheduler, number: int, experts: list[int]) -> tuple[list[list[int]], int]:
    """Play one step of a scheduler, and record what it does.

    Return the expert groups, and the largest number of experts in transfer at once. A chunk lands
    only when there is nothing to compute.
    """
    groups: list[list[int]] = []
    moving: list[StartChunk] = []
    most, actions = 0, scheduler.on(Routed(number, 0, np.array(experts)))
    while not any(isinstance(action, Finish) for action in actions):
        moving += [action for action in actions if isinstance(action, StartChunk)]
        most = max(most, len(moving))
        order = next((action for action in actions if isinstance(action, ComputeGroup)), None)
        if order is not None:
            groups.append(order.experts.tolist())
            actions = scheduler.on(Computed(order.device))
        else:
            landed = moving.pop(0)
            actions = scheduler.on(Landed(landed.lane, landed.piece, landed.link))
    return groups, most


@pytest.mark.parametrize(
    ("early", "reorder", "groups", "most"),
    [
        (False, False, [[0, 1], [2, 3], [4]], 1),
        (True, False, [[0, 1], [2, 3], [4]], 3),
        (True, True, [[1, 3], [0], [2], [4]], 3),
    ],
    ids=["base", "preemption", "reordering"],
)
def test_ablation_variants_group_and_start_experts_as_named(
    early: bool, reorder: bool, groups: list[list[int]], most: int
) -> None:
    ablated = replay_module("ablation").Ablated
    pieces = Pieces.unsplit([0, 8], [100], [1] * 8)
    scheduler = ablated(pieces, 6, policy("lru"), lanes=3, early=early, reorder=reorder)
    play(scheduler, 0, RESIDENT)
    assert play(scheduler, 1, STEP) == (groups, most)
    assert scheduler.counts.misses == len(RESIDENT) + 3


@pytest.mark.bench_smoke
def test_experts_take_a_part_of_the_time_of_a_token(inputs: dict[str, Path]) -> None:
    rig = replay_module("rig").Rig(Path("demo"), inputs["recording"])
    token, experts, one = rig.resident(passes=4)
    assert 0 < one < experts < token
    rig.model.greenroom.detach()
