"""Steps that were computed, and that the scheduler has yet to serve."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple


class ComputedStep(NamedTuple):
    """A step of one token that a device has computed from slots.

    experts: returns the step's experts, as ids within the layer, ascending
    serve:   lets the scheduler serve the step
    """

    layer: int
    experts: Callable[[], list[int]]
    serve: Callable[[], None]


class DeferredSteps(threading.local):
    """The calling thread's steps that were computed, and that the scheduler has yet to serve.

    They are of one pass. They are served before the thread asks anything else of the scheduler,
    which therefore decides as if it had served them at once. The device computes later layers
    meanwhile.
    """

    def __init__(self, serve_together: Callable[[Sequence[ComputedStep]], int]) -> None:
        """Begin without steps; `serve_together` serves the first ones, returns how many."""
        self._serve_together, self._steps = serve_together, list[ComputedStep]()

    def add(self, step: ComputedStep) -> None:
        """Add a step, to be served after those before."""
        if self._steps and step.layer <= self._steps[-1].layer:
            self.settle()
        self._steps.append(step)

    def settle(self) -> None:
        """Serve all steps."""
        if self._steps:
            steps, self._steps = self._steps, []
            for step in steps[self._serve_together(steps) :]:
                step.serve()
