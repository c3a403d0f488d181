"""Reports that kernels write to the host's memory: which experts a token chose, and misses."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np

from greenroom.core.compiling.compile_cache import jit
from greenroom.core.compiling.steady_call import SteadyCall
from greenroom.core.pieces import Ints
from greenroom.errors import DeviceError

PATIENCE = 1000  # looks at a report before the device is asked whether it still works


Report = TypeVar("Report")


def wait_for_report(read: Callable[[], Report | None], is_idle: Callable[[], bool]) -> Report:
    """Wait for a report; `read` returns it, or None while it is not there.

    Raises DeviceError if the device has done all work without it (`is_idle`).
    """
    looks = 0
    while (report := read()) is None:
        looks += 1
        if looks % PATIENCE == 0 and is_idle() and read() is None:
            raise DeviceError("the GPU failed: it has not reported a token's experts")
        time.sleep(0)  # threads that move experts need Python's lock
    return report


class TokenReport(NamedTuple):
    """A look-up's result for the experts that one token chose in a layer.

    pieces:  ids in the model of the layer's own experts, ascending, [n]
    misses:  how many of them were in no slot
    numbers: [3, top_k], see `parse`
    """

    pieces: Ints
    misses: int
    numbers: Ints

    @property
    def by_rank(self) -> Ints:
        """Return the choices [top_k], as ids within the layer, with other processes' experts."""
        return self.numbers[1]

    @property
    def missing(self) -> list[int]:
        """Return the experts that were in no slot, as ids within the layer."""
        missing: list[int] = self.numbers[2, : self.misses].tolist()
        return missing


@jit(_nrt=False)
def parse(report: Ints, number: int, first: int, experts: int, out: Ints) -> int:
    """Read a report of the look-up with this number (see `triton/look_up.py`).

    first:   the id in the model of the layer's first expert
    experts: the layer's number of experts; ids from this one on are of other processes
    out:     [3, top_k]; receives the ids in the model of the layer's own experts, ascending; all
             choices by rank, as ids within the layer; those of missing experts by rank

    Returns (n << 32 | misses), where n experts are the layer's own; -1 if it is not complete.
    """
    n = misses = 0
    for rank in range(report.size):
        value = report[rank]  # once: the device may write it meanwhile
        if value >> 32 != number:  # they ascend
            return -1
        expert = value >> 1 & 0x7FFFFFFF
        out[1, rank] = expert
        if expert >= experts:
            continue
        if not value & 1:
            out[2, misses] = expert
            misses += 1
        at, piece = n, first + expert
        while at > 0 and out[0, at - 1] > piece:
            at -= 1
        if at > 0 and out[0, at - 1] == piece:
            continue
        for i in range(n, at, -1):
            out[0, i] = out[0, i - 1]
        out[0, at] = piece
        n += 1
    return n << 32 | misses


_parse = SteadyCall(parse)


def read_token(report: Ints, number: int, first: int, experts: int) -> TokenReport | None:
    """Return the report of a look-up; None if it is not complete. See `parse`."""
    numbers = np.empty((3, report.size), np.int64)
    counts = _parse(report, number, first, experts, numbers)
    if counts < 0:
        return None
    return TokenReport(numbers[0, : counts >> 32], counts & 0xFFFFFFFF, numbers)
