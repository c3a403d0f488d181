"""Threads that make experts: each reads one, encodes it and writes it to its place."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue

import torch

from greenroom.core.layout import Catalog
from greenroom.hf.checkpoint.pack.checked import checked
from greenroom.hf.checkpoint.pack.crc import checksums
from greenroom.hf.checkpoint.pack.format import Layer
from greenroom.hf.pack.data import Data
from greenroom.hf.pack.target import Maker
from greenroom.runtime.slots.host import HostSlots
from greenroom.runtime.store.disk import DiskStore, Staging

BUFFERS = 768 << 20  # bytes of experts under way, unless a single one takes more


def make_experts(
    catalog: Catalog,
    layers: Sequence[Layer],
    makers: Sequence[Sequence[Maker]],
    data: Data,
    todo: Sequence[int],
) -> Generator[tuple[int, tuple[int, ...]], None, None]:
    """(expert, checksums) of each of `todo`, in order, when it has been written.

    `layers` say where experts go, `makers` how those of each layer are made. Each thread has room
    for an expert as it was and one as it shall be.
    """
    stride = max(layer.stride for layer in layers)
    store = checked(DiskStore(catalog), catalog)
    longest = max(c.length for e in (0, catalog.experts - 1) for c in store.chunks(e))
    each = catalog.slot_bytes + stride + longest
    count = max(1, min((os.cpu_count() or 1) + 1, BUFFERS // each, catalog.experts))
    sources, targets = HostSlots(count, catalog.slot_bytes), HostSlots(count, stride)
    free: SimpleQueue[tuple[int, Staging]] = SimpleQueue()
    for slot in range(count):
        free.put((slot, Staging()))

    def make(expert_id: int) -> tuple[int, tuple[int, ...]]:
        slot, staging = free.get()
        try:
            for chunk in store.chunks(expert_id):
                sources.write(slot, chunk.extent.copies, store.read(chunk, staging), chunk.start)
            number = catalog.layer_of(expert_id)
            layer, expert = layers[number], expert_id - catalog.offsets[number]
            target = targets.bytes(slot)[: layer.stride]
            target.fill(0)
            for maker in makers[number]:
                maker(partial(sources.tensor, slot), partial(targets.tensor, slot), expert)
            data.write(target, layer.place(expert))
            return expert_id, checksums(layer.runs, target.data)
        finally:
            free.put((slot, staging))

    try:
        with _one_thread_each(), ThreadPoolExecutor(count, "pack") as pool:
            yield from pool.map(make, todo)
    finally:  # no thread writes any more
        store.close()
        sources.close()
        targets.close()


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """torch's operations on one core: there is a thread for each already."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
