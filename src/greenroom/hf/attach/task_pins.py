"""Experts of tasks that stay: a prompt says which task's, by what it uses."""

from __future__ import annotations

import numpy as np

from greenroom.core.cache.pins import Pins
from greenroom.core.events import Keep
from greenroom.core.predictor import Ids
from greenroom.runtime.driver.driver import Driver


class TaskPins:
    """Counts what each prompt uses; when its answer begins, the nearest task's experts are kept.

    With one task alone its experts are kept from the start.
    """

    def __init__(self, pins: Pins, driver: Driver) -> None:
        self._pins, self._driver = pins, driver
        self._counts = np.zeros(pins.offsets[-1], np.int64)
        self._reading = False  # is the pass a prompt's?
        self._request = 0
        driver.order(Keep(pins.first))

    def on_pass(self, request: int, prompt: bool, sequences: int) -> None:
        """A pass begins."""
        if len(self._pins.tasks) == 1:
            return
        if request != self._request:
            self._request = request
            self._counts[:] = 0
        if self._reading and not prompt:
            task = self._pins.nearest(self._counts)
            self._driver.order(Keep(self._pins.tasks[task].experts))
        self._reading = prompt

    def on_choice(self, layer: int, experts: Ids) -> None:
        """A layer's router has chosen: ids within it, [T, K]."""
        if self._reading:
            first, end = self._pins.offsets[layer : layer + 2]
            used = experts[(experts >= 0) & (experts < end - first)] + first
            self._counts += np.bincount(used.reshape(-1), minlength=self._counts.size)
