"""Whose experts stay: those of the task that a prompt is of."""

from __future__ import annotations

from typing import Any

import numpy as np

from greenroom.core.cache.pins import Pins, Task
from greenroom.hf.attach.task_pins import TaskPins


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
