"""Scenarios of the threads that predict, and that compute on the host processor."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from greenroom.errors import StoreError
from greenroom.runtime.driver.host_worker import HostWorker
from greenroom.runtime.driver.meter import Meter
from greenroom.runtime.driver.prediction_worker import PredictionWorker
from tests.runtime.cuda.host_rig import HostComputeDriver
from tests.schedules.driver import EXPERTS, LAYERS, TRACED, catalog
from tests.schedules.primitives import point
from tests.schedules.runner import Scenario, run_threads


def _play_predictions(random: Random) -> None:
    """Jobs are queued and waited for by two threads, while another one closes the worker."""
    errors: list[BaseException] = []
    worker = PredictionWorker(errors.append)
    ran: list[int] = []
    is_closing = False

    def make_job(number: int) -> Callable[[], None]:
        def job() -> None:
            point()
            ran.append(number)
            if number % 5 == 4:
                raise ZeroDivisionError

        return job

    def put(first: int, count: int) -> None:
        for number in range(first, first + count):
            worker.put(make_job(number))
        had_begun = is_closing
        worker.drain()
        if not (had_begun or is_closing):
            assert {*range(first, first + count)} <= {*ran}

    def close() -> None:
        nonlocal is_closing
        is_closing = True
        worker.close()

    counts = random.randint(0, 6), random.randint(0, 3)
    works = [lambda: put(0, counts[0]), lambda: put(100, counts[1])]
    run_threads(*works, *([close] if random.random() < 0.5 else []))
    worker.close()
    for first in (0, 100):
        own = [number for number in ran if first <= number < first + 100]
        assert own == sorted({*own})  # in their order, each once
    assert len(errors) == sum(number % 5 == 4 for number in ran)
    worker.drain()


def _play_host_jobs(random: Random) -> None:
    """Jobs of the host processor are started and waited for, and some fail."""
    worker, done = HostWorker(Meter.for_lanes(())), list[tuple[int, bool]]()

    def start(first: int, count: int) -> None:
        for number in range(first, first + count):

            def job(number: int = number) -> None:
                point()
                if number % 3 == 2:
                    raise ValueError(number)

            worker.start(job, lambda error, number=number: done.append((number, error is None)))
            if number % 2:
                worker.wait()
                assert {each for each, _ in done} >= {*range(first, number + 1)}
        worker.wait()

    counts = random.randint(1, 5), random.randint(0, 3)
    run_threads(lambda: start(0, counts[0]), lambda: start(99, counts[1]))
    worker.close()
    numbers = [*range(counts[0]), *range(99, 99 + counts[1])]
    assert sorted(done) == [(number, number % 3 != 2) for number in numbers]


def _play_host_steps(random: Random) -> None:
    """A driver computes some experts of its steps on the host; reads fail; the cache is resized."""
    broken = [random.random() < random.choice((0.0, 0.2)) for _ in range(97)]
    rig = HostComputeDriver(
        catalog(), random.randint(3, 8), random.randint(4, 9), random.choice((1e-5, 1e-3)),
        fails=lambda read: broken[read % 97],
    )  # fmt: skip
    steps = [
        (layer, sorted(random.sample(range(EXPERTS), random.randint(1, 4))))
        for _ in range(random.randint(2, 3))
        for layer in range(LAYERS)
    ]
    sizes = [random.randint(3, 12) for _ in range(random.randint(0, 2))]

    def compute() -> None:
        for layer, experts in steps:
            if layer == 0:
                rig.begin()
            try:
                rig.step(layer, *experts)
            except StoreError:
                assert any(broken)

    def resize() -> None:
        for size in sizes:
            rig.driver.resize(size)

    run_threads(compute, resize)
    rig.settle()
    assert not rig.tier.leases
    assert not rig.scheduler.placement.cache.state.pinned.any()
    rig.driver.close()


PREDICTIONS = Scenario("predictions", _play_predictions, TRACED)
HOST_JOBS = Scenario("host-jobs", _play_host_jobs, TRACED)
HOST_STEPS = Scenario("host-steps", _play_host_steps, TRACED, length=3000)
