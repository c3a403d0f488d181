"""Scenarios of the driver: steps, prefetches, resizes, failures and ends in any order."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from greenroom.core.events import Idle
from greenroom.core.layout import Catalog, Copy
from greenroom.core.predictor import LayerPrediction, LayerRouting, PassStart
from greenroom.errors import ClosedError, Interrupted, StoreError
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.attach.statistics import totals
from greenroom.runtime.fakes import FakeSlots
from tests.runtime.expert_file import write_experts
from tests.runtime.rig import Ahead, Rig
from tests.schedules.primitives import point
from tests.schedules.runner import Scenario, run_threads

LAYERS, EXPERTS, SIZE = 2, 6, 1200
CHUNK_BYTES = 4096  # three chunks an expert

TRACED = tuple(
    f"greenroom.runtime.driver.{name}"
    for name in ("driver", "copier", "action_queue", "change_signal", "fair_lock", "host_worker",
                 "prediction_worker", "predictions", "device_steps", "ordered_copies")
)  # fmt: skip
Step = tuple[int, tuple[int, ...]]


class TornSlots(FakeSlots):
    """Slots into which a chunk is written in two halves, with a point between them."""

    def write(self, slot: int, copies: tuple[Copy, ...], data: np.ndarray, start: int) -> None:
        half = data.size // 8 * 4
        point()
        super().write(slot, copies, data[:half], start)
        point()
        super().write(slot, copies, data[half:], start + half)
        point()


@cache
def catalog() -> Catalog:
    """The file of experts of all schedules of this process."""
    folder = Path(tempfile.mkdtemp(prefix="schedules-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return write_experts(folder, LAYERS, EXPERTS, SIZE)


class Left(Exception):
    """The reader of an answer has left: a pass ends in the middle of a step."""


class FailingPredictor(Ahead):
    """A predictor that fails after some calls."""

    def __init__(self, say: Callable[[int], Sequence[int]], calls: int) -> None:
        super().__init__(say)
        self._calls = calls

    def _count(self) -> None:
        self._calls -= 1
        if self._calls < 0:
            raise ZeroDivisionError("the predictor fails")

    def begin(self, at: PassStart) -> None:
        self._count()

    def observe(self, routing: LayerRouting) -> None:
        self._count()

    def predict(self, layer: int) -> list[LayerPrediction]:
        self._count()
        return super().predict(layer)


class Workload:
    """The routing of a few passes, the predictions, and what goes wrong."""

    def __init__(self, random: Random, predicts: bool = False) -> None:
        """Draw a workload; with `predicts`, a worker predicts and fails soon."""
        self.random = random
        self.passes: list[list[tuple[int, ...]]] = [
            [self._draw_experts() for _ in range(LAYERS)] for _ in range(random.randint(2, 4))
        ]
        self.guesses = [[self._draw_experts() for _ in range(LAYERS + 1)] for _ in self.passes]
        self.number = 0
        calls = random.choice((0 if predicts else 99, random.randint(0, 9)))
        self.leaves = {
            (number, layer)
            for number in range(len(self.passes))
            for layer in range(LAYERS)
            if random.random() < 0.1
        }
        self.failing = random.choice((0.0, 0.0, 0.1, 0.5))
        broken = [random.random() < self.failing for _ in range(97)]
        lanes = random.choice((1, 2, 2, (1, 1), (2, 1)))
        self.rig = Rig(
            catalog(),
            random.randint(1, LAYERS * EXPERTS),
            lanes,
            CHUNK_BYTES,
            ahead=random.choice((0, 2, 4)),
            predictor=FailingPredictor(self._guess, calls)
            if predicts or random.random() < 0.8
            else None,
            worker=predicts or random.random() < 0.5,
            tier_slots=random.choice((0, 3)) if isinstance(lanes, tuple) else 0,
            slots=TornSlots,
            fails=lambda read: broken[read % 97],
            latency=random.choice((0.0, 1e-3)),
        )
        # What `Greenroom.timeline` needs.
        setup = SimpleNamespace(catalog=catalog())
        self.greenroom: Any = SimpleNamespace(driver=self.rig.driver, setup=setup)

    def _draw_experts(self) -> tuple[int, ...]:
        count = self.random.choice((1, 2, 2, 3, EXPERTS))
        return tuple(sorted(self.random.sample(range(EXPERTS), count)))

    def _guess(self, layer: int) -> Sequence[int]:
        guess = self.guesses[self.number % len(self.guesses)][min(layer, LAYERS)]
        right = self.passes[self.number % len(self.passes)][layer % LAYERS]
        return right if (layer + self.number) % 2 else guess

    def compute(self, *allowed: type[BaseException]) -> None:
        """Run the passes; steps may fail with the allowed exceptions."""
        rig = self.rig
        for number, layers in enumerate(self.passes):
            self.number = number
            rig.begin(prefill=number == 0, request=number // 2)
            for layer, experts in enumerate(layers):
                if number % 2 and rig.scheduler.view.borrow_limit:
                    pieces = np.array(experts) + EXPERTS * layer
                    rig.driver.predictions.announce_routing(layer, pieces)
                try:
                    rig.step(layer, *experts, compute=self._check_twice)
                except StoreError:
                    assert self.failing
                except Left:
                    break
                except allowed:
                    pass
            rig.driver.end_pass()

    def _check_twice(self, experts: np.ndarray, slots: np.ndarray) -> None:
        self.rig.compute(experts, slots)
        point()
        del self.rig.computed[-len(experts) :]
        self.rig.compute(experts, slots)  # nobody wrote into the slots meanwhile
        if (self.number, self.rig.layer) in self.leaves:
            raise Left

    def end(self) -> None:
        """Check what is left, and close the driver."""
        self.rig.driver.predictions.drain()  # or its worker begins a prefetch after the check
        self.rig.settle()
        self.rig.check()
        self.rig.driver.close()


def _play_steps(random: Random) -> None:
    """Several threads: one computes, others resize the cache, announce and send idle reads."""
    work = Workload(random)
    driver = work.rig.driver
    sizes = [random.randint(1, LAYERS * EXPERTS) for _ in range(random.randint(0, 3))]
    order = np.array(random.sample(range(LAYERS * EXPERTS), LAYERS * EXPERTS))

    def resize() -> None:
        for size in sizes:
            driver.resize(size)
            assert driver.scheduler.capacity == size

    def idle() -> None:
        driver.send(Idle(order))

    def record() -> None:
        for on in (True, False, True, False, True, False):
            Greenroom.timeline(work.greenroom, on)

    def read_stats() -> None:
        for _ in range(2):
            totals(driver, work.rig.tier)
            driver.scheduler.view.expert_states()
            driver.scheduler.view.queue_lengths()

    others = [each for each in (resize, idle, record, read_stats) if random.random() < 0.4]
    run_threads(work.compute, *others)
    work.end()


def _play_predictor(random: Random) -> None:
    """A predictor fails in its own thread, while the model computes."""
    work = Workload(random, predicts=True)
    work.compute()
    work.rig.driver.predictions.drain()
    work.end()


def _play_end(random: Random) -> None:
    """The driver is closed, or a pass is interrupted, while it computes and resizes."""
    work = Workload(random)
    driver = work.rig.driver
    closes = random.random() < 0.6
    sizes = [random.randint(1, LAYERS * EXPERTS) for _ in range(2)]

    def compute() -> None:
        work.compute(ClosedError, Interrupted)

    def interrupt() -> None:
        driver.interrupt()
        point()
        driver.resume()

    def resize() -> None:
        try:
            for size in sizes:
                driver.resize(size)
        except ClosedError:
            assert closes

    def close() -> None:
        driver.close()

    def drain() -> None:
        driver.predictions.drain()

    others = [each for each in (resize, interrupt, drain) if random.random() < 0.6]
    run_threads(compute, *others, *([close] if closes else []))
    if closes:
        driver.close()
    else:
        work.end()


STEPS = Scenario("steps", _play_steps, TRACED, length=4000)
ENDS = Scenario("ends", _play_end, TRACED, length=2000)
PREDICTOR = Scenario("predictor", _play_predictor, TRACED, length=2000)
