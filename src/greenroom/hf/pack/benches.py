"""Threads that make experts: each reads one, encodes it and writes it to its place."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue

import torch

from greenroom.core.layout import Catalog, TensorSpec
from greenroom.hf.checkpoint.pack.checked import checked
from greenroom.hf.checkpoint.pack.crc import checksums
from greenroom.hf.checkpoint.pack.format import Layer
from greenroom.hf.pack.data import Data
from greenroom.hf.pack.target import Lookup
from greenroom.runtime.slots.host import HostSlots
from greenroom.runtime.store.disk import DiskStore, Staging

Make = Callable[[Lookup, Lookup, int], None]  # (source, target, number) of an expert

BUFFERS = 768 << 20  # bytes of experts under way, unless a single one takes more


class Benches:
    """Benches have room for an expert as it was and one as it shall be; there is a thread for each.

    `layers` say where experts go, `makers` how those of each layer are made.
    """

    def __init__(
        self, catalog: Catalog, layers: Sequence[Layer], makers: Sequence[Make], data: Data
    ) -> None:
        self.catalog, self.layers, self.makers, self.data = catalog, layers, makers, data
        stride = max(layer.stride for layer in layers)
        self.store = checked(DiskStore(catalog), catalog)
        longest = max(c.length for e in (0, catalog.experts - 1) for c in self.store.chunks(e))
        each = catalog.slot_bytes + stride + longest
        self.count = max(1, min((os.cpu_count() or 1) + 1, BUFFERS // each, catalog.experts))
        self.sources = HostSlots(self.count, catalog.slot_bytes)
        self.targets = HostSlots(self.count, stride)
        self.free: SimpleQueue[tuple[int, Staging]] = SimpleQueue()
        for slot in range(self.count):
            self.free.put((slot, Staging()))

    def make(self, todo: Iterable[int]) -> Generator[tuple[int, tuple[int, ...]], None, None]:
        """(expert, checksums) of each, in order, when it has been written."""
        waiting: deque[Future[tuple[int, tuple[int, ...]]]] = deque()
        with _one_thread_each(), ThreadPoolExecutor(self.count, "pack") as pool:
            try:
                for expert in todo:
                    waiting.append(pool.submit(self._make, expert))
                    if len(waiting) > 2 * self.count:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _make(self, expert_id: int) -> tuple[int, tuple[int, ...]]:
        slot, staging = self.free.get()
        try:
            for chunk in self.store.chunks(expert_id):
                data = self.store.read(chunk, staging)
                self.sources.write(slot, chunk.extent.copies, data, chunk.start)
            number = self.catalog.layer_of(expert_id)
            layer, expert = self.layers[number], expert_id - self.catalog.offsets[number]
            target = self.targets.bytes(slot)[: layer.stride]
            target.fill(0)
            self.makers[number](_tensors(self.sources, slot), _tensors(self.targets, slot), expert)
            self.data.write(target, layer.place(expert))
            return expert_id, checksums(layer.runs, target.data)
        finally:
            self.free.put((slot, staging))

    def __enter__(self) -> Benches:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()
        self.sources.close()
        self.targets.close()


def _tensors(slots: HostSlots, slot: int) -> Callable[[TensorSpec], torch.Tensor]:
    """The tensors of the expert in a slot."""
    return lambda spec: slots.tensor(slot, spec)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """torch's operations on one core: there is a thread for each already."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
