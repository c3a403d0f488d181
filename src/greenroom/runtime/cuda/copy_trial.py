"""A trial of two ways to copy experts from host memory to slots."""

from __future__ import annotations

import logging

TRIES = 8  # steps of each way whose rates count
WARM_UP = 2  # steps of each way before

log = logging.getLogger(__name__)


class CopyTrial:
    """Tries two ways to copy a step's experts in turn, then keeps the faster one.

    One launch of a kernel saves the host the launches of all copies; the device's copy engines may
    have a higher rate, which no data sheet says.
    """

    def __init__(self) -> None:
        self._launches = {True: 0, False: 0}  # by a kernel or not
        self._steps, self._nbytes = {True: 0, False: 0}, {True: 0, False: 0}
        self._seconds = {True: 0.0, False: 0.0}
        self._kernel_is_best: bool | None = None

    def next_by_kernel(self) -> bool:
        """Decide whether a kernel copies the next step's experts."""
        if self._kernel_is_best is not None:
            return self._kernel_is_best
        by_kernel = self._launches[True] <= self._launches[False]
        self._launches[by_kernel] += 1
        return by_kernel

    def add(self, by_kernel: bool, nbytes: int, seconds: float) -> None:
        """Add a step's copies: their bytes, and the device's seconds for them."""
        if self._kernel_is_best is not None:
            return
        self._steps[by_kernel] += 1
        if self._steps[by_kernel] > WARM_UP:
            self._nbytes[by_kernel] += nbytes
            self._seconds[by_kernel] += seconds
        if min(self._steps.values()) >= WARM_UP + TRIES:
            kernel, copies = (
                self._nbytes[way] / max(1e-9, self._seconds[way]) for way in (True, False)
            )
            self._kernel_is_best = kernel >= copies
            log.info(
                "--device cuda: experts in host memory are copied by %s (%.1f GB/s by a kernel,"
                " %.1f GB/s by copies)",
                "a kernel" if self._kernel_is_best else "copies",
                kernel / 1e9,
                copies / 1e9,
            )
