"""Scenario of the thread that watches free memory: readings, resizes by others, and its end."""

from __future__ import annotations

from random import Random
from typing import Any

from greenroom.core.cache.pressure import MemoryReading
from greenroom.errors import ClosedError
from greenroom.hf.memory.pressure import FixedSlots, PressureWatcher
from tests.hf.memory.sensor import PLENTY, SHORT, FakeSensor
from tests.schedules.driver import EXPERTS, LAYERS, TRACED, Workload
from tests.schedules.primitives import THREADS, point
from tests.schedules.runner import Scenario, run_threads


def _play(random: Random) -> None:
    """Memory becomes short and free again while a model computes, is resized, and is closed."""
    work, sensor, lock = Workload(random), FakeSensor(), THREADS.Lock()
    driver, most = work.rig.driver, work.rig.scheduler.capacity
    size, grown = most, 0
    closes, stops = (random.random() < 0.25 for _ in range(2))

    def note_growth() -> None:
        nonlocal grown
        grown += 1

    arguments: dict[str, Any] = {"sensor": sensor, "on_growth": note_growth}
    watcher = PressureWatcher(
        driver, work.rig.catalog.slot_bytes, None, lambda: FixedSlots(driver, size), lock,
        min_slots=1, **arguments,
    )  # fmt: skip
    # Mostly a shortage, and then calm readings, after which the cache may grow.
    kinds = [(random.choice((SHORT, PLENTY)), 0.1) for _ in range(2)]
    kinds += [(random.choice((SHORT, PLENTY, PLENTY)), 10.0) for _ in range(4)]
    sizes = [random.randint(1, LAYERS * EXPERTS) for _ in range(3)]

    moments = [THREADS.Event() for _ in kinds]
    resized_at = sorted(random.sample(range(len(kinds)), len(sizes)))

    def report() -> None:
        for moment, (free, after_s) in zip(moments, kinds, strict=True):
            moment.set()
            if closes or stops:
                sensor.now += after_s
                sensor.readings.put(MemoryReading(sensor.now, free, 0))
            else:
                sensor.report(free, after_s)  # the watcher reacts to each

    def resize() -> None:
        nonlocal size
        for number, new in zip(resized_at, sizes, strict=True):
            moments[number].wait()
            with lock:
                size = new
                try:
                    driver.resize(new)
                except ClosedError:
                    assert closes
                else:  # with the lock, nobody else changes the size
                    point()
                    assert driver.scheduler.capacity == new

    def compute() -> None:
        work.compute(ClosedError)

    def end() -> None:
        if stops:
            watcher.stop()
            with lock:
                before = driver.scheduler.capacity
                assert before <= max(size, 1)
        if closes:
            driver.close()

    run_threads(compute, report, resize, end)
    watcher.stop()
    if closes:
        driver.close()
    else:
        assert driver.scheduler.capacity <= size
        work.end()
    assert grown == watcher.stats()["growths"]


PRESSURE = Scenario("pressure", _play, (*TRACED, "greenroom.hf.memory.pressure"), length=3500)
