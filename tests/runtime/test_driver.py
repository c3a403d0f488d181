from __future__ import annotations

import os
import random
import threading
import time

import numpy as np
import pytest

from greenroom.core.pieces import Pieces
from greenroom.core.scheduler import Scheduler
from greenroom.errors import ClosedError, StoreError
from greenroom.policies import policy
from greenroom.runtime.driver import Driver
from greenroom.runtime.fakes import FakeSlots, FakeStore
from greenroom.runtime.store import DiskStore
from greenroom.sim.simulate import TraceStep, simulate


class Rig:
    """A driver over a real file, which checks that every expert is computed from its own bytes."""

    def __init__(self, catalog, capacity: int, lanes: int = 2, chunk_bytes: int = 8192, **faults):
        self.catalog = catalog
        self.store = FakeStore(DiskStore(catalog, chunk_bytes=chunk_bytes), **faults)
        chunks = [len(self.store.chunks(e)) for e in range(catalog.experts)]
        self.pieces = Pieces.whole(
            catalog.offsets, [layout.nbytes for layout in catalog.layouts], chunks
        )
        self.scheduler = Scheduler(self.pieces, capacity, policy("lru"), lanes=lanes)
        self.slots = FakeSlots(capacity, catalog.slot_bytes, reserve=catalog.experts)
        self.driver = Driver(self.scheduler, self.store, self.slots)
        self.layer, self.computed = 0, []

    def compute(self, experts: np.ndarray, slots: np.ndarray) -> None:
        layout = self.catalog.layouts[self.layer]
        for expert, slot in zip(experts, slots, strict=True):
            identity = self.catalog.offsets[self.layer] + expert
            for name, value in (("up", identity), ("down", identity + 0.5)):
                held = self.slots.tensor(int(slot), layout[name])
                assert (held == value).all(), (identity, name)
            self.computed.append(int(expert))

    def step(self, layer: int, *experts: int) -> None:
        self.layer, self.computed = layer, []
        self.driver.step(layer, np.array(experts, np.int64), self.compute)
        assert sorted(self.computed) == list(experts)


@pytest.fixture
def rig(disk):
    rigs = []

    def make(*args, layers=2, experts=4, **kwargs) -> Rig:
        rigs.append(Rig(disk(layers, experts), *args, **kwargs))
        return rigs[-1]

    yield make
    for each in rigs:
        each.driver.close()


def threads() -> set[int | None]:
    return {t.ident for t in threading.enumerate() if t.name.startswith("greenroom")}


@pytest.mark.parametrize("lanes", [1, 2, 4])
@pytest.mark.parametrize("capacity", [1, 3, 8])
def test_random_steps_under_random_delays(rig, lanes, capacity):
    rng = random.Random(lanes * 10 + capacity)
    r = rig(capacity, lanes, jitter=0.002, seed=capacity)
    trace = []
    for step in range(30):
        for layer in range(2):
            experts = sorted(rng.sample(range(4), rng.randint(1, 4)))
            r.step(layer, *experts)
            trace.append(TraceStep(step, layer, np.array(experts, np.int64) + 4 * layer))
    simulated = simulate(trace, r.pieces, capacity, policy("lru"))
    counts = r.scheduler.counts
    assert (counts.requests, counts.misses) == (simulated.requests, simulated.misses)
    assert r.driver.meter.bytes_read == simulated.misses * 24_000
    assert r.driver.meter.passes == 30


def test_a_failed_read_harms_one_step_only(rig):
    r = rig(4, fails=lambda read: read == 5, chunk_bytes=1 << 20)
    r.step(0, 0, 1, 2, 3)
    with pytest.raises(StoreError, match="read 5 failed"):
        r.step(1, 0, 1)
    r.step(1, 0, 1)
    r.step(0, 0, 1, 2, 3)


def test_every_read_failing_is_an_error_and_not_a_hang(rig):
    r = rig(3, fails=lambda read: True)
    for _ in range(3):
        with pytest.raises(StoreError):
            r.step(0, 0, 1, 2, 3)
    assert r.scheduler.cache.residents().size == 0


def test_an_unforeseen_error_in_a_reader_is_reported_and_the_lane_lives(rig, monkeypatch):
    r = rig(4)

    def broken(*args):
        raise ValueError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(r.slots, "write", broken)
        with pytest.raises(StoreError, match="a bug"):
            r.step(0, 1, 2)
    r.step(0, 1, 2)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_step_leaves_the_cache_sound(rig, error):
    r = rig(3, jitter=0.005)
    calls = []

    def interrupted(experts, slots):
        calls.append(experts)
        raise error("stop")

    for _ in range(5):
        with pytest.raises(error):
            r.driver.step(0, np.arange(4), interrupted)
        r.step(1, 0, 1, 2)
        r.step(0, 0, 1, 2, 3)
    assert len(calls) == 5


def test_resizing_while_another_thread_runs_steps(rig):
    r = rig(8, jitter=0.0005)
    stop = threading.Event()

    def resize():
        rng = random.Random(1)
        while not stop.is_set():
            r.driver.resize(rng.randint(1, 8))
            time.sleep(0.001)

    thread = threading.Thread(target=resize)
    thread.start()
    rng = random.Random(2)
    try:
        for _ in range(60):
            r.step(rng.randrange(2), *sorted(rng.sample(range(4), rng.randint(1, 4))))
    finally:
        stop.set()
        thread.join()
    assert r.slots.capacity == r.scheduler.cache.capacity


def test_closing_ends_the_threads_and_refuses_steps(rig):
    before = threads()
    r = rig(4, lanes=3)
    r.step(0, 1)
    assert len(threads()) == len(before) + 3
    descriptors = len(os.listdir("/proc/self/fd"))
    r.driver.close()
    r.driver.close()
    assert threads() == before
    assert len(os.listdir("/proc/self/fd")) < descriptors
    with pytest.raises(ClosedError, match="load it again"):
        r.step(0, 1)


def test_stalls_are_counted(rig):
    r = rig(4, latency=0.05, chunk_bytes=1 << 20)
    r.step(0, 0)
    assert 0.05 <= r.driver.meter.stall_s < 5
    stalled = r.driver.meter.stall_s
    r.step(0, 0)
    assert r.driver.meter.stall_s == stalled
