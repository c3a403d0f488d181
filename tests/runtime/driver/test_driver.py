from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

from greenroom.core.events import Landed
from greenroom.errors import ClosedError, Interrupted, StoreError
from greenroom.policies import policy
from greenroom.sim.clock import TraceStep
from tests.runtime.rig import ahead, in_time, threads
from tests.sim.small import simulate


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
    with pytest.raises(StoreError, match="read number 5 failed"):
        r.step(1, 0, 1)
    r.step(1, 0, 1)
    r.step(0, 0, 1, 2, 3)


def test_every_read_failing_is_an_error_and_not_a_hang(rig):
    r = rig(3, fails=lambda read: True)
    for _ in range(3):
        with pytest.raises(StoreError):
            r.step(0, 0, 1, 2, 3)
    assert r.scheduler.residents().size == 0


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
    assert r.slots.capacity == r.scheduler.placement.cache.capacity


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
    with pytest.raises(ClosedError, match="load the model again"):
        r.step(0, 1)


def test_stalls_are_counted(rig):
    r = rig(4, latency=0.05, chunk_bytes=1 << 20)
    r.step(0, 0)
    assert 0.05 <= r.driver.meter.stall_s < 5
    stalled = r.driver.meter.stall_s
    r.step(0, 0)
    assert r.driver.meter.stall_s == stalled


def test_a_resize_that_comes_after_closing_is_refused(rig):
    """A prefetch that was moving then never lands."""
    r = ahead(rig, lambda layer: [3, 4], latency=0.05)
    r.begin()
    r.step(0, 0)
    r.driver.close()

    def resize() -> None:
        with pytest.raises(ClosedError):
            r.driver.resize(5)

    in_time(resize)


def test_a_resize_to_the_present_size_does_nothing(rig, monkeypatch):
    r = ahead(rig, lambda layer: [], capacity=8)
    r.begin()
    r.step(0, 0)
    events, tell = [], r.driver._handle
    monkeypatch.setattr(
        r.driver, "_handle", lambda event: (events.append(type(event).__name__), tell(event))
    )
    for capacity in (8, 8, 5, 5, 8, 8):
        r.driver.resize(capacity)
    assert events.count("Resized") == 2


def test_a_pass_that_begins_after_closing_moves_nothing(rig):
    r = ahead(rig, lambda layer: [3, 4] if layer == 0 else [])
    r.begin()
    r.settle()
    assert r.scheduler.counts.prefetches == 2
    r.step(0, 0)
    r.driver.close()
    r.begin()
    assert r.driver.meter.links[0].moving == 0
    assert r.scheduler.counts.prefetches == 2


def test_an_interrupt_while_an_interrupted_step_is_left_harms_no_later_step(rig, monkeypatch):
    """The chunk that the first one waits for lands later; its end is not the next step's."""
    r = rig(4, latency=0.05, lanes=1)
    wait = r.driver._changed.wait

    def interrupted(*args):
        raise KeyboardInterrupt

    def compute(experts, slots):
        monkeypatch.setattr(r.driver._changed, "wait", interrupted)
        raise KeyboardInterrupt

    r.step(0, 0)
    with pytest.raises(KeyboardInterrupt):
        r.step(0, 0, 1, compute=compute)
    monkeypatch.setattr(r.driver._changed, "wait", wait)
    time.sleep(0.3)
    r.step(1, 0, 1, 2)
    r.step(0, 0, 1)
    r.settle()
    r.check()


@pytest.mark.parametrize("while_", ["waiting", "resizing", "leaving"])
def test_a_scheduler_that_breaks_in_a_copier_s_thread_is_an_error_and_not_a_hang(
    rig, monkeypatch, while_
):
    r = rig(4, latency=0.02, lanes=1)
    decide = r.scheduler.on

    def breaks(event, now):
        if isinstance(event, Landed):
            raise ZeroDivisionError("a bug")
        return decide(event, now)

    def interrupted(*args):
        raise KeyboardInterrupt

    def act() -> None:
        r.step(0, 0)
        monkeypatch.setattr(r.scheduler, "on", breaks)
        expected = KeyboardInterrupt if while_ == "leaving" else ClosedError
        with pytest.raises(expected):
            r.step(0, 0, 1, compute=interrupted if while_ == "leaving" else None)
        if while_ == "resizing":
            with pytest.raises(ClosedError, match=r"a bug.*load the model again"):
                r.driver.resize(3)
        with pytest.raises(ClosedError, match=r"a bug.*load the model again"):
            r.step(0, 0)
        r.driver.close()

    in_time(act)
    assert r.driver._actions.broken is not None


def test_a_decision_that_is_interrupted_breaks_the_driver(rig, monkeypatch):
    """The target of a chunk is unknown then, so no later step may trust the slots."""
    r = rig(4, latency=0.02)

    def interrupted(action):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(r.driver._copier, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            r.step(0, 0)

    def act() -> None:
        with pytest.raises(ClosedError, match=r"KeyboardInterrupt.*load the model again"):
            r.step(0, 0)

    in_time(act)


def test_an_interrupted_resize_is_done_later(rig, monkeypatch):
    r = ahead(rig, lambda layer: [3, 4], latency=0.05)
    r.begin()
    r.step(0, 0)

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(r.driver._changed, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            r.driver.resize(5)
    r.settle()
    r.check()
    assert r.scheduler.capacity == 5
    r.step(1, 3, 4)


@pytest.mark.parametrize("at", ["grow", "handle"])
def test_an_interrupt_within_a_resize_waits_until_memory_and_scheduler_agree(
    rig, monkeypatch, at, ctrl_c
):
    """A pool that has other slots than the scheduler would lose experts at the next resize."""
    r = rig(4)
    driver = r.driver
    owner, name = (driver.slots, "grow") if at == "grow" else (driver, "_handle")
    work = getattr(owner, name)

    def interrupted(*given: Any) -> None:
        work(*given)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            driver.resize(6)
    assert r.scheduler.capacity == driver.slots.capacity == 6
    r.step(0, 0, 1)
    r.settle()
    r.check()


def test_overlapped_work_may_fail(rig):
    r = rig(4, latency=0.02)

    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        r.step(0, 0, 1, overlapped_work=fails)
    r.step(0, 0, 1)
    r.settle()
    r.check()


def test_an_interrupted_pass_is_abandoned(rig):
    r = rig(2, 1, latency=0.05)
    failed: list[BaseException] = []

    def step() -> None:
        try:
            r.step(0, 0, 1, 2, 3)
        except Interrupted as error:
            failed.append(error)

    in_time(step, lambda: (time.sleep(0.02), r.driver.interrupt()))
    assert failed
    reads = r.store.reads
    assert reads < 4 * 3  # chunks of all four experts
    with pytest.raises(Interrupted, match="nobody waits for its result"):
        r.step(0, 1)
    assert r.store.reads == reads
    r.driver.resume()
    r.step(0, 0, 1, 2, 3)


def test_an_interrupt_that_comes_at_any_time_leaves_the_cache_sound(rig):
    r = rig(3, 2, jitter=0.002)
    rng, over = random.Random(4), threading.Event()

    def interrupts() -> None:
        while not over.is_set():
            time.sleep(rng.random() * 0.004)
            r.driver.interrupt()

    def steps() -> None:
        done = given_up = 0
        while done < 20 or given_up < 5:
            r.driver.resume()
            try:
                r.step(done % 2, *sorted(rng.sample(range(4), rng.randint(1, 4))))
                done += 1
            except Interrupted:
                given_up += 1
        over.set()

    in_time(steps, interrupts)
    r.driver.resume()
    r.step(0, 0, 1, 2, 3)


@pytest.mark.parametrize("capacity", [1, 3, 8])
def test_misses_are_counted_by_layer(rig, capacity):
    r, rng = rig(capacity), random.Random(5)
    for _ in range(20):
        for layer in range(2):
            r.step(layer, *sorted(rng.sample(range(4), rng.randint(1, 4))))
    assert r.driver.miss_counts.sum() == r.scheduler.counts.misses
    requests = [int(r.driver.request_counts[4 * layer : 4 * layer + 4].sum()) for layer in range(2)]
    assert all(
        0 < missed <= each for missed, each in zip(r.driver.miss_counts, requests, strict=True)
    )
