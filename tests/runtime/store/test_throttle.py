from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from greenroom.runtime.store import throttle
from greenroom.runtime.store.throttle import MOST_OVERSLEPT, Throttle


class Clock:
    """Time that passes only in sleep, which lasts `over` seconds too long."""

    def __init__(self, over: float = 0.0) -> None:
        self.now, self.over, self.slept = 100.0, over, 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.now += seconds + self.over


@pytest.fixture(autouse=True)
def _real_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "time", time)


def throttle_with(clock: Clock, bandwidth: float = 1000.0) -> Throttle:
    throttle.time = SimpleNamespace(perf_counter=clock, sleep=clock.sleep)  # type: ignore[assignment]
    return Throttle(bandwidth)


def test_a_chunk_takes_its_bytes_over_the_bandwidth():
    clock = Clock()
    throttle_with(clock).carry(500)
    assert clock.now == pytest.approx(100.5)


def test_an_idle_link_saves_no_time_for_later():
    clock = Clock()
    link = throttle_with(clock)
    link.carry(500)
    clock.now += 10
    link.carry(500)
    assert clock.now == pytest.approx(111.0)


@pytest.mark.parametrize("over", [0.0, MOST_OVERSLEPT / 2])
def test_late_wake_ups_do_not_add_up(over):
    clock = Clock(over)
    link = throttle_with(clock)
    for _ in range(1000):
        link.carry(100)
    assert clock.now == pytest.approx(200.0 + over, abs=1e-6)


def test_a_thread_that_could_not_run_gets_back_at_most_a_millisecond():
    clock = Clock(over=60.0)
    link = throttle_with(clock)
    link.carry(1000)
    assert clock.now == pytest.approx(161.0)
    clock.over = 0.0
    link.carry(1000)
    assert clock.now == pytest.approx(162.0 - MOST_OVERSLEPT)


def test_early_work_of_the_caller_is_part_of_the_transfer():
    clock = Clock()
    link = throttle_with(clock)
    for _ in range(10):
        link.carry(1000, early=0.4)
        clock.now += 0.4  # the copy
    assert clock.now == pytest.approx(110.0)


def test_work_longer_than_the_transfer_limits_the_rate():
    clock = Clock()
    link = throttle_with(clock)
    for _ in range(10):
        link.carry(100, early=3.0)
        clock.now += 3.0
    assert clock.now == pytest.approx(130.0)
    assert clock.slept == 0


def test_threads_share_the_bandwidth():
    """Real threads, real sleep: together they take the time of one, and next to no processor."""
    link = Throttle(1e6)
    begin, cpu = time.perf_counter(), time.process_time()
    threads = [
        threading.Thread(target=lambda: [link.carry(2_500) for _ in range(20)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.perf_counter() - begin >= 0.2  # 4 * 20 * 2500 bytes; longer on a busy machine
    assert time.process_time() - cpu < 0.15


def test_without_a_bandwidth_nothing_waits():
    clock = Clock()
    throttle_with(clock, float("inf")).carry(1 << 40)
    assert clock.now == 100.0
