"""The forward passes of a model: their numbers, their layers and their times."""

from __future__ import annotations

import time
from typing import NamedTuple

from greenroom.core.predictor import PassStart
from greenroom.runtime.driver.meter import Meter


class PassTimes(NamedTuple):
    """The times of a forward pass that has ended.

    begin, end: by `time.perf_counter`
    waited:     seconds in which the pass waited for experts
    tokens:     the number of its tokens
    """

    begin: float
    end: float
    waited: float
    tokens: int


class Passes:
    """The model's forward passes: the present one, and its present layer.

    number:  of passes before the present one; a layer that is not after the last one begins a pass
    layer:   the layer of the present step
    request: the request that the pass belongs to
    prefill: the pass reads (a block of) a prompt
    """

    def __init__(self, meter: Meter, layers: int) -> None:
        self._meter = meter
        self.number, self.layer, self.request, self.prefill = -1, layers, 0, False
        self._start: tuple[float, float, int] | None = None  # time, stall_s, tokens

    def begin(self, at: PassStart) -> None:
        """Start the clock of a pass."""
        self.request, self.prefill = at.request, at.prefill
        self._start = time.perf_counter(), self._meter.stall_s, at.tokens

    def end(self) -> PassTimes | None:
        """Stop the clock of the pass, and count a decode pass; None if none has begun."""
        if self._start is None:
            return None
        (begin, stalls, tokens), self._start = self._start, None
        now, waited = time.perf_counter(), self._meter.stall_s - stalls
        if not self.prefill:
            self._meter.add_decode(now - begin, waited)
        return PassTimes(begin, now, waited, tokens)

    def note_layers(self, first: int, last: int) -> None:
        """Record the steps of a pass's layers, from a first to a last one."""
        self.number += first <= self.layer
        self.layer = last
        self._meter.passes = self.number + 1
