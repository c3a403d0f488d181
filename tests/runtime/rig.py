"""A driver over a real file, which checks that experts are computed from their own bytes."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from greenroom.core.cache.buffer import BorrowState
from greenroom.core.layout import Catalog
from greenroom.core.pieces import Pieces
from greenroom.core.predictor import LayerPrediction, LayerRouting, PassStart
from greenroom.core.prefetch.foresight import Foresight
from greenroom.core.prefetch.guard import Guard
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.core.transfers.tiers import HostTier
from greenroom.errors import StoreError
from greenroom.policies import policy
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.host import HostMemory
from greenroom.runtime.driver.driver import Driver
from greenroom.runtime.fakes import FakeSlots, FakeStore
from greenroom.runtime.store.disk import DiskStore

PATIENCE = 60.0  # seconds; each test takes a fraction of a second


def threads() -> set[int | None]:
    return {t.ident for t in threading.enumerate() if t.name.startswith("greenroom")}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def in_time(*works: Callable[[], None]) -> None:
    """Run each function in its own thread; fail with all stacks if one does not end in time."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=guarded, args=(w,), daemon=True) for w in works]
    until = time.monotonic() + PATIENCE
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread in running):
        frames = sys._current_frames().values()
        pytest.fail("it hangs:\n" + "\n".join("".join(traceback.format_stack(f)) for f in frames))
    if errors:
        raise errors[0]


class Rig:
    """A driver, its store, scheduler and slots, over the file of a catalog.

    `predictor` prefetches into `ahead` slots, with `worker` from a thread of its own. With two
    links, host memory lies between them and a tier has `tier_slots` slots of it. `faults` are
    FakeStore's.
    """

    def __init__(
        self,
        catalog: Catalog,
        capacity: int,
        lanes: int | Sequence[int] = 2,
        chunk_bytes: int = 8192,
        *,
        named: str = "lru",
        scope: str = "shared",
        ahead: int = 0,
        predictor: Any = None,
        guard: bool = False,
        worker: bool = False,
        tier_slots: int = 0,
        slots: type[FakeSlots] = FakeSlots,
        **faults: Any,
    ) -> None:
        self.catalog = catalog
        self.store = FakeStore(DiskStore(catalog, chunk_bytes=chunk_bytes), **faults)
        chunks = [self.store.chunks(e) for e in range(catalog.experts)]
        self.pieces = Pieces.unsplit(
            catalog.offsets, [x.nbytes for x in catalog.layouts], [len(each) for each in chunks]
        )
        self.tier = HostTier(self.pieces, tier_slots, policy("lru")) if tier_slots else None
        self.scheduler = Scheduler(
            self.pieces, capacity, policy(named), lanes=lanes, scope=scope, ahead=ahead,
            host=self.tier,
        )  # fmt: skip
        self.slots = slots(capacity, catalog.slot_bytes, reserve=catalog.experts)
        queue = self.scheduler.transfers.queue
        links = ("disk -> host", "host -> device")[: len(queue.lanes)]
        memory = (
            HostMemory(Engine(), chunks, queue.staging_slots, tier_slots)
            if len(links) > 1
            else None
        )
        self.driver = Driver(
            self.scheduler,
            self.store,
            self.slots,
            foresight=None if predictor is None else Foresight(predictor, catalog.offsets),
            guard=Guard() if guard else None,
            predict_in_worker=worker,
            links=links,
            host_memory=memory,
        )
        self.layer, self.computed = 0, []

    def holds(self, slot: int, piece: int) -> bool:
        """Does a slot hold all bytes of a piece?"""
        layout = self.catalog.layouts[self.catalog.layer_of(piece)]
        parts = (("up", piece), ("down", piece + 0.5))
        return all(bool((self.slots.tensor(slot, layout[n]) == v).all()) for n, v in parts)

    def compute(self, experts: np.ndarray, slots: np.ndarray) -> None:
        for expert, slot in zip(experts, slots, strict=True):
            identity = self.catalog.offsets[self.layer] + int(expert)
            assert self.holds(int(slot), identity), identity
            self.computed.append(int(expert))

    def begin(self, prefill: bool = False, tokens: int = 1, request: int = 0) -> None:
        self.driver.begin_pass(PassStart(request, 0, tokens, prefill))

    def step(
        self,
        layer: int,
        *experts: int,
        compute: Callable[[np.ndarray, np.ndarray], None] | None = None,
        overlapped_work: Callable[[], None] | None = None,
    ) -> None:
        self.layer, self.computed = layer, []
        chosen = np.array(experts, np.int64)
        self.driver.step(
            layer,
            chosen,
            compute or self.compute,
            observe_routing=lambda inputs: LayerRouting(layer, chosen[None]),
            overlapped_work=overlapped_work,
        )
        assert sorted(self.computed) == list(experts)

    def settle(self, seconds: float = 20) -> None:
        """Wait until nothing is on its way."""
        until = time.monotonic() + seconds
        while True:
            with self.driver.lock:
                if not len(self.scheduler.transfers.entries):
                    return
            assert time.monotonic() < until, f"still moving: {self.scheduler.transfers.entries}"
            time.sleep(0.001)

    def check(self) -> None:
        """Between steps, with nothing on its way: no slot is lost, each holds what it should."""
        s = self.scheduler
        with self.driver.lock:
            assert s.step is None
            assert not len(s.transfers.entries)
            assert not s.placement.cache.state.pinned.any()
            residents = s.residents().tolist()
            borrowed, free = (
                s.placement.buffer.borrowed,
                int(s.placement.cache.state.free_count.sum()),
            )
            assert len(borrowed) + free + len(residents) == s.capacity == self.slots.capacity
            assert sorted(s.placement.tier_slots) == list(range(s.capacity))
            for piece in residents:
                assert self.holds(s.placement.slot(piece), piece)
            for piece, each in borrowed.items():
                assert each.state is BorrowState.COMPLETE
                assert self.holds(int(s.placement.tier_slots[each.slot]), piece)
            c = s.counts
            over = c.useful + c.late + c.wasted + c.dropped + c.displaced + c.failed + c.idle
            assert c.idle_used <= c.idle
            assert over + len(borrowed) == c.prefetches
            assert all(link.moving == 0 for link in self.driver.meter.links)


class Ahead:
    """A predictor that returns a function's choice for the layer after each."""

    name, distance = "scripted", 1

    def __init__(self, say: Callable[[int], Sequence[int]]) -> None:
        self._say = say

    def begin(self, at: PassStart) -> None: ...

    def observe(self, routing: LayerRouting) -> None: ...

    def predict(self, layer: int) -> list[LayerPrediction]:
        """`say(layer + 1)` are the experts to expect there, likeliest first; [] for no guess."""
        predicted = np.array([self._say(layer + 1)], np.int64)
        return [LayerPrediction(layer + 1, predicted)] if predicted.size else []

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Any) -> None: ...


def play_passes(rig: Rig, random: Random, after_pass: Callable[[int], None] | None = None) -> int:
    """Run 40 passes of random routing, every 13th a prompt; return the number of failed steps.

    A prompt uses all experts of every layer, another pass two of each.
    """
    sizes, failed = np.diff(rig.catalog.offsets).tolist(), 0
    for number in range(40):
        prefill = number % 13 == 0
        rig.begin(prefill, tokens=5 if prefill else 1, request=number // 13)
        for layer, size in enumerate(sizes):
            try:
                rig.step(layer, *sorted(random.sample(range(size), size if prefill else 2)))
            except StoreError:
                failed += 1
        rig.driver.end_pass()
        if after_pass is not None:
            after_pass(number)
    return failed


def ahead(rig: Any, say: Any, *, capacity=8, experts=8, size=2, **kwargs: Any) -> Rig:
    """Make a rig that prefetches the experts `say(layer)` into `size` slots."""
    return rig(capacity, experts=experts, ahead=size, predictor=Ahead(say), **kwargs)
