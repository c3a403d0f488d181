"""Whose experts stay: those of the task that a prompt is of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import greenroom
from greenroom.core.cache.pins import Pins, Task
from greenroom.errors import BudgetError
from greenroom.hf.attach.task_pins import TaskPins
from greenroom.hf.model.skeleton import ModelSkeleton
from tests.hf.memory.test_device import ids
from tests.models import cached_tiny


class Orders:
    """In the driver's place: the experts that are to stay, order by order."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []

    def send(self, keep: Any) -> None:
        self.given.append(keep.pieces.tolist())


def task(*experts: int) -> Task:
    return Task(np.array(experts), np.isin(np.arange(6), experts).astype(float))


def test_each_prompt_selects_the_task_that_it_resembles():
    orders: Any = Orders()
    pins = TaskPins(Pins({"coding": task(0, 3), "math": task(1, 4)}, (0, 3, 6)), orders)
    for request, used in ((1, 1), (2, 0)):
        pins.on_pass(request, True, 1)
        for layer in (0, 1):
            pins.on_routing(layer, np.array([[used, -1, 3]]))  # 3 is no expert of a layer
        for _ in range(2):
            pins.on_pass(request, False, 1)
            pins.on_routing(0, np.array([[2]]))  # an answer says nothing of its task
    assert orders.given == [[], [1, 4], [0, 3]]


def test_a_single_task_is_pinned_from_the_start():
    orders: Any = Orders()
    pins = TaskPins(Pins({"coding": task(0, 3)}, (0, 3, 6)), orders)
    pins.on_pass(1, True, 1)
    pins.on_pass(1, False, 1)
    assert orders.given == [[0, 3]]


@contextmanager
def loaded(folder: Path, **options: Any) -> Iterator[Any]:
    """A model with two tasks, of 2 and of 7 pinned experts in the first of two layers.

    Prompts resemble the second one.
    """
    model_folder = cached_tiny("qwen3_moe", tokenizer=True)
    offsets = tuple(ModelSkeleton.of(model_folder).catalog.offsets)
    no_use, uses = np.eye(1, offsets[-1], offsets[-1] - 1)[0], np.ones(offsets[-1])
    pins = Pins({"few": Task(np.arange(2), no_use), "many": Task(np.arange(7), uses)}, offsets)
    (folder / "pins.json").write_text(json.dumps(pins.as_json()))
    model, _ = greenroom.load(
        str(model_folder), kernels="eager", pin=str(folder / "pins.json"), **options
    )
    try:
        yield model
    finally:
        model.greenroom.detach()


def pinned(model: Any) -> int:
    model.generate(ids(1, 20), max_new_tokens=3, do_sample=False)
    return int(model.greenroom.driver.scheduler.placement.cache.pinned_set.size)


def test_a_resize_leaves_room_for_the_experts_of_every_task(tmp_path: Path) -> None:
    with loaded(tmp_path, cache="75%") as model:
        with pytest.raises(BudgetError, match="7 pinned experts leave none of 6 cache slots"):
            model.greenroom.resize(6 * model.greenroom.setup.catalog.slot_bytes)
        assert model.greenroom.capacity == 12
        assert pinned(model) == 7
        assert model.greenroom.resize(8 * model.greenroom.setup.catalog.slot_bytes) == 8
        assert pinned(model) == 7


def test_other_devices_have_room_for_the_experts_of_every_task(tmp_path: Path) -> None:
    with loaded(tmp_path, cache="75%", device="fake,fake") as model:
        with pytest.raises(BudgetError, match="7 pinned experts leave none of 6 cache slots"):
            model.greenroom.use_devices("fake")
        assert model.greenroom.devices == ["fake:0", "fake:1"]
        assert pinned(model) == 7


def test_a_budget_knows_the_fewest_slots_of_every_task(tmp_path: Path) -> None:
    """Of 15 slots in equal shares, the first layer has eight: one beside seven pinned experts."""
    with loaded(tmp_path, memory="60GiB", scope="per-layer") as model:
        assert model.greenroom.slot_budget.min_slots == 15
