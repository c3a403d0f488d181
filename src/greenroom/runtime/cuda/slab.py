"""Host memory whose slots are laid out as kernels read them, so that the host's processor computes
from where experts wait for their device.

Bytes as the disk has them (`host`) are read straight into their place, and rearranged by the device
as they arrive there. Here a chunk is read into the reading thread's own staging buffer and copied
into its expert's slot once; on its way to the device nothing is left to be rearranged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from greenroom.core.events import StartChunk
from greenroom.core.layout import Copy
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.host import HostMemory
from greenroom.runtime.slots.host import HostSlots
from greenroom.runtime.store.disk import Chunk, Staging


class PlacedSlots(HostSlots):
    """Slots in memory that is another's."""

    def __init__(self, memory: np.ndarray, stride: int) -> None:
        self.capacity = self.reserve = memory.size // stride
        self.stride, self._bytes = stride, memory
        self.base = memory.ctypes.data
        self._torch = torch.from_numpy(memory)


class Slab(HostMemory):
    """`seats` as they are, then `capacity` slots of `stride` bytes as a layer's layout has them."""

    slots: HostSlots

    def __init__(
        self,
        engine: Engine,
        chunks: Sequence[tuple[Chunk, ...]],
        seats: int,
        capacity: int,
        stride: int,
        nodes: Sequence[tuple[int, int | None]] = (),
    ) -> None:
        super().__init__(engine, chunks, seats, capacity, nodes, stride)
        self.slots = PlacedSlots(self._bytes[self._first_slot : self.nbytes], stride)
        self._local = threading.local()

    def bring(
        self, action: StartChunk, chunk: Chunk, read: Callable[[Chunk, Any], np.ndarray]
    ) -> None:
        """Have a chunk read, and put into its seat or its expert's slot."""
        if action.host < 0:
            super().bring(action, chunk, read)
            return
        if not hasattr(self._local, "staging"):
            self._local.staging = Staging()
        data = read(chunk, self._local.staging)
        self.slots.write(action.host, chunk.extent.copies, data, chunk.start)

    def source(self, action: StartChunk, chunk: Chunk) -> tuple[tuple[Copy, ...], np.ndarray, int]:
        """As `HostMemory.source`: of what is in a slot, the parts that this chunk has brought."""
        if action.host < 0:
            return super().source(action, chunk)
        return in_place(chunk), self.slots.bytes(action.host), 0


def in_place(chunk: Chunk) -> tuple[Copy, ...]:
    """Where a chunk's bytes lie in a slot, as copies from one slot to another."""
    found, stop = [], chunk.start + chunk.length
    for copy in chunk.extent.copies:
        if copy.contiguous:
            begin, end = max(copy.source, chunk.start), min(copy.source + copy.nbytes, stop)
            if begin < end:
                at, n = copy.target + begin - copy.source, end - begin
                found.append(Copy(at, at, (1, n), (n, 1), (n, 1), "uint8", "uint8"))
        else:  # such an extent is one chunk
            strides, dtype = copy.target_strides, copy.target_dtype
            found.append(Copy(copy.target, copy.target, copy.shape, strides, strides, dtype, dtype))
    return tuple(found)
