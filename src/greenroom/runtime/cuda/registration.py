"""Registration (pinning) of host memory with a GPU, in pieces.

One call for all memory would take seconds without a sign of life, and one refusal would leave all
of it to the driver's buffers. CUDA refuses a copy that spans two registrations, so pieces begin
where slots do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from greenroom.interrupts import hold_interrupts
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.store.disk import BLOCK

PIECE = 1 << 30  # bytes that one call registers
Range = tuple[int, int]  # first byte and number of bytes


def pieces_of_memory(starts: NDArray[np.int64], end: int, most: int) -> list[Range]:
    """Divide memory into pieces for registration, each of whole slots and pages.

    starts: the first byte of each slot, ascending, the first one 0
    end:    bytes of the memory
    most:   bytes of a piece; more where slots are larger, or share pages
    """
    cuts = np.append(starts[starts % BLOCK == 0], end)  # a page can be registered once
    pieces, begin = [], 0
    while begin < end:
        last = int(np.searchsorted(cuts, begin + most, side="right")) - 1
        if cuts[last] <= begin:
            last += 1
        pieces.append((begin, int(cuts[last]) - begin))
        begin = int(cuts[last])
    return pieces


class Registration:
    """Pieces of host memory that are registered with a GPU.

    nbytes:  bytes of these pieces
    refused: why the device or the system refused a further piece; "" if they did not
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._addresses = engine, list[int]()
        self.nbytes, self.refused = 0, ""

    def add(self, address: int, pieces: Sequence[Range], progress: Callable[[float], None]) -> None:
        """Register pieces of the memory at an address, in order, until one is refused.

        `progress` is called with the share that is done, from 0 to 1.
        """
        total, done = sum(nbytes for _, nbytes in pieces), 0
        for first, nbytes in pieces:
            with hold_interrupts():  # Ctrl-C would leave a piece that nobody unregisters
                if refused := self._engine.register(address + first, nbytes):
                    self.refused = refused
                    return
                self._addresses.append(address + first)
            self.nbytes, done = self.nbytes + nbytes, done + nbytes
            progress(done / total)

    def close(self) -> None:
        """End the registration of all pieces."""
        with hold_interrupts():
            while self._addresses:
                self._engine.unregister(self._addresses.pop())
        self.nbytes = 0
