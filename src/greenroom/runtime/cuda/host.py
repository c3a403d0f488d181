"""Host memory that serves a GPU: staging slots for transfers, and a cache of experts.

All of it is one mapping, registered (pinned) with the GPU in pieces, so that copies run
concurrently with computation. If the system refuses to pin a piece (for example because of a limit
of locked memory), copies from there and from what follows go through the GPU driver's buffers, more
slowly, and a warning is logged. Staging slots come first, so they are the last to lose it. A slot
in the layout of the disk contains an expert's chunks (parts of at most 4 MiB) one after another,
each with the room that direct reads need around it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from greenroom.config import show_bytes
from greenroom.core.events import StartChunk
from greenroom.core.layout import Copy
from greenroom.errors import DeviceError
from greenroom.runtime.cuda.copy_plans import CopyPlans
from greenroom.runtime.cuda.engine import Engine, Mark
from greenroom.runtime.cuda.registration import PIECE, Registration, pieces_of_memory
from greenroom.runtime.memory import numa
from greenroom.runtime.memory.system import reserve_memory
from greenroom.runtime.slots.host import HostSlots
from greenroom.runtime.slots.tier import overlap
from greenroom.runtime.store.disk import BLOCK, Chunk, Staging

log = logging.getLogger(__name__)


def chunk_room(chunk: Chunk) -> int:
    """Return how many bytes of memory a direct read of an expert's chunk needs.

    Direct reads begin and end at multiples of 4 KiB.
    """
    return -(-chunk.length // BLOCK) * BLOCK + 2 * BLOCK


class HostMemory:
    """Host memory that serves a GPU: staging slots for chunks, and cache slots for experts.

    A chunk is a part of an expert of at most 4 MiB. By default slots contain experts in the layout
    of the disk, and the GPU rearranges the weights when they arrive. With a `stride`, cache slots
    have the layout that kernels read, and the host processor can compute from them (`slots`): a
    chunk is read into the thread's staging buffer, rearranged into its expert's slot, and copied
    unchanged from there to the GPU.

    plans:          what callers derive from the bytes in a slot, until the next read into the slot
    mark_of_copies: returns the event behind copies from a slot, beside that of `mark_read`
    """

    def __init__(
        self,
        engine: Engine,
        chunks: Sequence[tuple[Chunk, ...]],
        staging_slots: int,
        capacity: int,
        nodes: Sequence[tuple[int, int | None]] = (),
        stride: int | None = None,
        groups: Sequence[tuple[int, NDArray[np.int64]]] | None = None,
    ) -> None:
        """Reserve the host memory; `pin` registers it with the GPU.

        chunks: the chunks of each expert, expert segment or copy (piece)
        capacity: number of cache slots of equal size, which fit any piece
        nodes: (number of cache slots, NUMA node) for each device, or for each of `groups`
        stride: bytes of a cache slot from which the host processor computes
        groups: groups of cache slots in place of `capacity`: (number of slots, pieces that fit)

        Raises DeviceError if there is not enough address space.
        """
        self.engine, self._chunks = engine, chunks
        self.staging_bytes, self.slot_bytes = slot_sizes(chunks)
        self.slot_bytes = stride or self.slot_bytes
        self._first_byte = first_byte = staging_slots * self.staging_bytes
        sizes = [(capacity, self.slot_bytes)]
        if groups is not None:
            sizes = slots_by_size(piece_rooms(chunks), groups)
        # Of each group: its first slot, its first byte, and the bytes of a slot.
        self._groups: list[tuple[int, int, int]] = []
        self.capacity, self.nbytes = 0, first_byte
        for number, nbytes in sizes:
            self._groups.append((self.capacity, self.nbytes, nbytes))
            self.capacity, self.nbytes = self.capacity + number, self.nbytes + number * nbytes
        try:
            self._map = reserve_memory(max(self.nbytes, BLOCK), large_pages=True)
        except DeviceError as error:
            what = f"{show_bytes(self.nbytes)} of experts"
            raise DeviceError(
                f"no host memory for {what} ({error}): give a smaller --host-memory"
            ) from error
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._first_slots = [group[0] for group in self._groups]
        self.slots: HostSlots | None = None
        if stride is not None:
            memory = self._bytes[first_byte : self.nbytes]
            self.slots = HostSlots(capacity, stride, memory=memory)
        self._at: dict[tuple[int, int, int], np.ndarray] = {}  # a chunk's bytes, by `_key`
        self._launched: dict[int, Mark] = {}  # by slot: behind the last copies from there
        self.mark_of_copies: Callable[[int], Mark] = lambda host_slot: None
        self.plans = CopyPlans(
            self.capacity,
            max(sum(len(chunk.extent.copies) for chunk in each) for each in chunks),
        )
        address = self._bytes.ctypes.data
        each = [self.slot_bytes] * len(nodes) if groups is None else [size for _, size in sizes]
        parts = [(n * nbytes, node) for (n, node), nbytes in zip(nodes, each, strict=False)]
        numa.place(address + first_byte, parts)
        with contextlib.suppress(OSError, AttributeError):  # a fork would copy pinned pages
            self._map.madvise(mmap.MADV_DONTFORK)
        self._registration = Registration(engine)

    def pin(
        self, progress: Callable[[float], None] = lambda share: None, piece: int = PIECE
    ) -> None:
        """Register the memory with the GPU, in pieces of `piece` bytes.

        `progress` is called with the share that is done. What cannot be registered is used as it
        is, and a warning says so.
        """
        starts = [np.arange(0, self._first_byte, self.staging_bytes)]
        for (first, at, nbytes), (end, _, _) in pairwise([*self._groups, (self.capacity, 0, 0)]):
            starts.append(at + np.arange(end - first) * nbytes)
        registration = self._registration
        pieces = pieces_of_memory(np.concatenate(starts), self.nbytes, piece)
        registration.add(self._bytes.ctypes.data, pieces, progress)
        if registration.refused:
            log.warning(
                "%s of %s of host memory could not be registered with the GPU (%s): copies from"
                " there are slower and do not overlap with computation; a higher limit of locked"
                " memory (ulimit -l), or a smaller --host-memory, may help",
                show_bytes(self.nbytes - registration.nbytes),
                show_bytes(self.nbytes),
                registration.refused,
            )

    def read_chunk(
        self,
        action: StartChunk,
        chunk: Chunk,
        read: Callable[[Chunk, Staging], np.ndarray],
        staging: Staging,
    ) -> None:
        """Read a chunk of an expert from the store into its place in host memory.

        `staging` is the read buffer of the calling thread. `read` may return memory of its own; the
        bytes are then copied.
        """
        if action.host_slot >= 0:
            self.plans.forget(action.host_slot)
        if (mark := self.mark_of_copies(action.host_slot)) is not None:
            self.engine.wait(mark)
        # It stays: another chunk of the slot may have a later mark when this wait ends.
        if (mark := self._launched.get(action.host_slot)) is not None:
            self.engine.wait(mark)
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
        """Return the arguments of `SlotPool.write` that write a chunk to a device slot.

        They are (copies, bytes, first offset). The chunk must have been read into host memory.
        """
        if action.host_slot >= 0:
            return self.slot_source(action.host_slot, action.chunk, chunk)
        return chunk.extent.copies, self._at[self._key(action)], chunk.start

    def slot_source(
        self, host_slot: int, number: int, chunk: Chunk
    ) -> tuple[tuple[Copy, ...], np.ndarray, int]:
        """Return the arguments of `chunk_source` for an expert's chunk, by number, in a slot."""
        if self.slots is not None:
            return in_place_copies(chunk), self.slots.bytes(host_slot), 0
        return chunk.extent.copies, self._at[host_slot, number, 1], chunk.start

    def mark_read(self, host_slots: Sequence[int], mark: Mark) -> None:
        """Have later reads into slots wait for copies that were launched from there."""
        self._launched.update(dict.fromkeys(host_slots, mark))

    @property
    def kernels_can_read(self) -> bool:
        """Tell whether kernels on the device can read all of the memory: `pin` registered it."""
        return self.engine.kernels_read_host and self._registration.nbytes >= self.nbytes

    @staticmethod
    def _key(action: StartChunk) -> tuple[int, int, int]:
        """Return a key for the place in host memory that a chunk is read into."""
        cached = action.host_slot >= 0
        return (action.host_slot, action.chunk, 1) if cached else (action.staging_slot, 0, 0)

    def _place(self, action: StartChunk) -> np.ndarray:
        """Return the host memory that a chunk is read into: at least `chunk_room` bytes."""
        begin, nbytes = action.staging_slot * self.staging_bytes, self.staging_bytes
        if action.host_slot >= 0:
            *before, nbytes = map(chunk_room, self._chunks[action.piece][: action.chunk + 1])
            group = self._groups[bisect_right(self._first_slots, action.host_slot) - 1]
            first_slot, first_byte, slot_bytes = group
            begin = first_byte + (action.host_slot - first_slot) * slot_bytes + sum(before)
        return self._bytes[begin : begin + nbytes]

    def close(self) -> None:
        """Unpin the host memory and return its pages to the system.

        The address range is freed when the last array that views the memory is deleted.
        """
        self._registration.close()
        with contextlib.suppress(OSError, ValueError):
            self._map.madvise(mmap.MADV_DONTNEED)


def slot_sizes(chunks: Sequence[tuple[Chunk, ...]]) -> tuple[int, int]:
    """Return the sizes in bytes of a staging slot and of a cache slot.

    The slots are in host memory, and contain bytes as they are on disk. A staging slot has room for
    the largest chunk of an expert, a cache slot for the largest expert.
    """
    staging_bytes = max(chunk_room(chunk) for each in chunks for chunk in each)
    return staging_bytes, int(piece_rooms(chunks).max())


def slots_by_size(
    rooms: NDArray[np.int64], groups: Sequence[tuple[int, NDArray[np.int64]]]
) -> list[tuple[int, int]]:
    """Return the sizes of groups of slots in host memory: (number of slots, bytes of a slot).

    `groups` are (number of slots, pieces that fit); `rooms` has the bytes that each piece takes.
    """
    return [(n, int(rooms[pieces].max(initial=0))) for n, pieces in groups]


def piece_rooms(chunks: Sequence[tuple[Chunk, ...]]) -> NDArray[np.int64]:
    """Return the bytes of host memory that each expert, segment or copy takes: [pieces].

    `chunks` has the chunks of each; one without chunks takes 0 bytes.
    """
    return np.array([sum(map(chunk_room, each)) for each in chunks], np.int64)


def in_place_copies(chunk: Chunk) -> tuple[Copy, ...]:
    """Return the copies that move a chunk to the same offsets of another slot.

    Fields of blocks are separated on the way.
    """
    copies = []
    for copy in chunk.extent.copies:
        if not copy.contiguous:  # such an extent is one chunk
            strides, dtype = copy.target_strides, copy.target_dtype
            moved = Copy(copy.target, copy.target, copy.shape, strides, strides, dtype, dtype)
        elif part := overlap(copy, chunk.start, chunk.length):
            at, n = part[1].start, part[1].stop - part[1].start
            moved = Copy(at, at, (1, n), (n, 1), (n, 1), "uint8", "uint8")
        else:
            continue
        copies.append(replace(moved, matrix=copy.matrix))
    return tuple(copies)
