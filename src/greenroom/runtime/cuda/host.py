"""Host memory behind a device: the staging slots, and the slots of the tier that keeps experts.

One reservation, made and registered with the device once: registered memory is read by the device
itself, beside everything else. Where the system refuses to register it (locked memory is limited,
say), copies go by the driver's own buffers, slower, and a warning says so. Bytes as the disk has
them lie chunk after chunk, each with the room that direct reads need around it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Callable, Sequence

import numpy as np

from greenroom.config import show_bytes
from greenroom.core.events import StartChunk
from greenroom.core.layout import Copy
from greenroom.errors import DeviceError
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.memory import numa
from greenroom.runtime.memory.system import reserve_memory
from greenroom.runtime.slots.host import HostSlots
from greenroom.runtime.slots.tier import overlap
from greenroom.runtime.store.disk import BLOCK, Chunk, Staging

log = logging.getLogger(__name__)


def chunk_room(chunk: Chunk) -> int:
    """Bytes that a chunk may take here: direct reads begin and end at blocks."""
    return -(-chunk.length // BLOCK) * BLOCK + 2 * BLOCK


class HostMemory:
    """`staging_slots` places for a chunk, then `capacity` slots for all chunks of an expert.

    Slots hold an expert as the disk has it, and the device rearranges it as it arrives there. With
    a `stride`, `slots` are laid out as kernels read them, so that the host's processor computes
    from them: a chunk is read into the reading thread's own staging buffer and copied into its
    expert's slot once, and on its way to the device nothing is left to be rearranged.
    """

    def __init__(
        self,
        engine: Engine,
        chunks: Sequence[tuple[Chunk, ...]],
        staging_slots: int,
        capacity: int,
        nodes: Sequence[tuple[int, int | None]] = (),
        stride: int | None = None,
    ) -> None:
        """`chunks` of every expert; `nodes` are (slots, NUMA node) of each device's part, where
        there are several. DeviceError where there is no address space for it."""
        self.engine, self.capacity = engine, capacity
        self.staging_bytes, self.slot_bytes = slot_sizes(chunks)
        if stride is not None:
            self.slot_bytes = stride
        self.nbytes = staging_slots * self.staging_bytes + capacity * self.slot_bytes
        try:
            self._map = reserve_memory(max(self.nbytes, BLOCK), large_pages=True)
        except DeviceError as error:
            what = f"{show_bytes(self.nbytes)} of experts"
            raise DeviceError(f"no host memory for {what}: {error}") from error
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._first_slot = staging_slots * self.staging_bytes
        self._chunks = chunks
        self.slots: HostSlots | None = None
        if stride is not None:
            memory = self._bytes[self._first_slot : self.nbytes]
            self.slots = HostSlots(capacity, stride, memory=memory)
        self._at: dict[tuple[int, int, int], np.ndarray] = {}  # the bytes of a chunk, see `_key`
        address = self._bytes.ctypes.data
        numa.place(address + self._first_slot, [(n * self.slot_bytes, node) for n, node in nodes])
        self.refused = engine.register(address, self.nbytes)
        if self.refused is not None:
            log.warning(
                "%s of host memory could not be registered with the GPU (%s): copies to it are"
                " slower, and wait for one another; a higher limit of locked memory (ulimit -l), or"
                " a smaller --host-memory, may help",
                show_bytes(self.nbytes),
                self.refused,
            )

    def read_chunk(
        self,
        action: StartChunk,
        chunk: Chunk,
        read: Callable[[Chunk, Staging], np.ndarray],
        staging: Staging,
    ) -> None:
        """Have a chunk read into its place; a store that lends its own memory is copied from.
        `staging` is the thread's."""
        if self.slots is not None and action.host_slot >= 0:
            data = read(chunk, staging)
            self.slots.write(action.host_slot, chunk.extent.copies, data, chunk.start)
            return
        place = self._place(action)
        data = read(chunk, Staging(memory=place))
        if not np.may_share_memory(data, place):
            place[: data.size] = data
            data = place[: data.size]
        self._at[self._key(action)] = data

    def chunk_source(
        self, action: StartChunk, chunk: Chunk
    ) -> tuple[tuple[Copy, ...], np.ndarray, int]:
        """(copies, bytes, where they start) that put a chunk that was brought here into a slot."""
        if self.slots is not None and action.host_slot >= 0:
            return in_place_copies(chunk), self.slots.bytes(action.host_slot), 0
        return chunk.extent.copies, self._at[self._key(action)], chunk.start

    @staticmethod
    def _key(action: StartChunk) -> tuple[int, int, int]:
        """What lies where; a place is that of one piece at a time."""
        kept = action.host_slot >= 0
        return (action.host_slot, action.chunk, 1) if kept else (action.staging_slot, 0, 0)

    def _place(self, action: StartChunk) -> np.ndarray:
        """What a store reads a chunk into; it never asks for more than the chunk's `chunk_room`."""
        begin, nbytes = action.staging_slot * self.staging_bytes, self.staging_bytes
        if action.host_slot >= 0:
            *before, nbytes = map(chunk_room, self._chunks[action.piece][: action.chunk + 1])
            begin = self._first_slot + action.host_slot * self.slot_bytes + sum(before)
        return self._bytes[begin : begin + nbytes]

    def close(self) -> None:
        """Give the pages back; the address range goes with the last view of it."""
        if self.refused is None:
            self.engine.unregister(self._bytes.ctypes.data)
            self.refused = "closed"
        with contextlib.suppress(OSError, ValueError):
            self._map.madvise(mmap.MADV_DONTNEED)


def slot_sizes(chunks: Sequence[tuple[Chunk, ...]]) -> tuple[int, int]:
    """Bytes of a staging slot, which takes any chunk, and of a slot, which takes any expert."""
    return (
        max(chunk_room(chunk) for each in chunks for chunk in each),
        max(sum(chunk_room(chunk) for chunk in each) for each in chunks),
    )


def in_place_copies(chunk: Chunk) -> tuple[Copy, ...]:
    """Where a chunk's bytes lie in a slot, as copies from one slot to another."""
    found = []
    for copy in chunk.extent.copies:
        if not copy.contiguous:  # such an extent is one chunk
            strides, dtype = copy.target_strides, copy.target_dtype
            found.append(Copy(copy.target, copy.target, copy.shape, strides, strides, dtype, dtype))
        elif part := overlap(copy, chunk.start, chunk.length):
            at, n = part[1].start, part[1].stop - part[1].start
            found.append(Copy(at, at, (1, n), (n, 1), (n, 1), "uint8", "uint8"))
    return tuple(found)
