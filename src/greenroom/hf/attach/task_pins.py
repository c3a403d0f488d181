"""Keep the experts of a prompt's task in the cache (`--pin`)."""

from __future__ import annotations

import numpy as np

from greenroom.core.cache.pins import Pins
from greenroom.core.events import Pinned
from greenroom.core.predictor import Ids
from greenroom.runtime.driver.driver import Driver


class TaskPins:
    """Observer that pins the experts of the task that the last prompt resembles most.

    Tasks and their experts come from a file of `greenroom trace hot`. Pinned experts are not
    evicted. The pinned task changes when the first token after a prompt is decoded. If the file has
    only one task, its experts are pinned from the start.
    """

    def __init__(self, pins: Pins, driver: Driver) -> None:
        self._pins, self._driver = pins, driver
        self._counts = np.zeros(pins.offsets[-1], np.int64)
        self._in_prompt = False
        self._request = 0
        driver.send(Pinned(pins.first))

    def on_pass(self, request: int, prompt: bool, sequences: int) -> None:
        """Handle the start of a forward pass; the first after a prompt pins its task's experts."""
        if len(self._pins.tasks) == 1:
            return
        if request != self._request:
            self._request = request
            self._counts[:] = 0
        if self._in_prompt and not prompt:
            task = self._pins.nearest(self._counts)
            self._driver.send(Pinned(self._pins.tasks[task].experts))
        self._in_prompt = prompt

    def on_routing(self, layer: int, experts: Ids) -> None:
        """Count the experts that a prompt's tokens use.

        `experts` are ids within the layer, of shape [tokens, top_k].
        """
        if self._in_prompt:
            first, end = self._pins.offsets[layer : layer + 2]
            used = experts[(experts >= 0) & (experts < end - first)] + first
            self._counts += np.bincount(used.reshape(-1), minlength=self._counts.size)
