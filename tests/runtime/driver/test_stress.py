"""Real threads, random routing, delays, failures, sizes and ends: whatever happens, every expert is
computed from its own bytes, counts add up, and nothing hangs or is left behind."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest

from greenroom.core.events import Idle
from greenroom.errors import ClosedError, StoreError
from greenroom.policies import POLICIES
from tests.runtime.rig import Ahead, Rig, descriptors, in_time, threads

LAYERS, EXPERTS = 3, 8


class Left(Exception):
    """The reader of an answer has left."""


@dataclass(frozen=True)
class Play:
    """One run: what is asked of it and what goes wrong."""

    seed: int
    capacity: int = 10
    ahead: int = 4
    lanes: int | tuple[int, ...] = 2
    scope: str = "shared"
    named: str = "lru"
    predictor: str = "right"
    guard: bool = False
    worker: bool = False
    failing: float = 0.0
    leaving: float = 0.0
    prompts: float = 0.15
    resizing: bool = False
    jitter: float = 0.001
    passes: int = 40
    idle: float = 0.0  # chance that no request is computed after a pass


class Script:
    """The routing of a run: experts of each pass and layer, with some locality."""

    def __init__(self, play: Play) -> None:
        rng = self.rng = random.Random(play.seed)
        self.play, self.now = play, 0
        self.prefill = [rng.random() < play.prompts for _ in range(play.passes + 1)]
        self.experts: list[list[list[int]]] = []
        liked = [rng.sample(range(EXPERTS), EXPERTS) for _ in range(LAYERS)]
        for prefill in self.prefill:
            k = rng.randint(3, EXPERTS) if prefill else rng.randint(1, 3)
            self.experts.append(
                [sorted(set(rng.choices(order, range(EXPERTS, 0, -1), k=k))) for order in liked]
            )

    def guess(self, layer: int) -> list[int]:
        """The prediction for a layer ahead; beyond the last layer it is the next pass's."""
        at = self.now + layer // LAYERS
        used = self.experts[min(at, self.play.passes)][layer % LAYERS]
        others = [e for e in range(EXPERTS) if e not in used]
        rng = random.Random(f"{self.play.seed} {self.now} {layer}")
        if self.play.worker:
            time.sleep(self.play.jitter * rng.random())
        match self.play.predictor:
            case "right":
                return [*used, *others][:4]
            case "wrong":
                return others[:4]
            case "random":
                return rng.sample(range(EXPERTS), rng.randint(0, 5))
        raise AssertionError(self.play.predictor)


class Stage:
    """Runs a play, the actors in the thread that calls `run`."""

    def __init__(self, catalog, play: Play) -> None:
        self.play, self.script = play, Script(play)
        self.rng = random.Random(play.seed + 1)
        chances = random.Random(play.seed + 2)
        broken = [chances.random() < play.failing for _ in range(4096)]
        predictor = None if play.predictor == "none" else Ahead(self.script.guess)
        self.rig = Rig(
            catalog,
            play.capacity,
            play.lanes,
            named=play.named,
            scope=play.scope,
            ahead=play.ahead,
            predictor=predictor,
            guard=play.guard,
            worker=play.worker,
            jitter=play.jitter,
            seed=play.seed,
            fails=lambda read: broken[read % 4096],
        )
        self.lost = self.left = 0
        self.closing = False

    def run(self) -> None:
        script = self.script
        if self.play.idle:
            self._idle()
        # The slots are free now, and soon no more. A resize ends reads, which then may be none.
        if self.play.idle and not self.play.resizing:
            counts, end = self.rig.scheduler.counts, time.monotonic() + 20
            while not counts.idle and time.monotonic() < end:
                time.sleep(0.001)
        for script.now in range(self.play.passes):
            prefill = script.prefill[script.now]
            self.rig.begin(prefill, tokens=5 if prefill else 1, request=sum(script.prefill))
            try:
                for layer, experts in enumerate(script.experts[script.now]):
                    self._step(layer, experts)
            except StoreError:
                assert self.play.failing
                self.lost += 1
            except Left:
                self.left += 1
            except ClosedError:
                assert self.closing
                return
            finally:
                self.rig.driver.end_pass()
            if self.rng.random() < self.play.idle:
                self._idle()

    def _idle(self) -> None:
        every = self.rng.sample(range(LAYERS * EXPERTS), LAYERS * EXPERTS)
        with contextlib.suppress(ClosedError):
            self.rig.driver.send(Idle(np.array(every)))
        time.sleep(2 * self.play.jitter * self.rng.random())

    def _step(self, layer: int, experts: list[int]) -> None:
        leaves = self.rng.random() < self.play.leaving
        groups = 0

        def compute(chosen, slots) -> None:
            nonlocal groups
            groups += 1
            self.rig.compute(chosen, slots)
            time.sleep(self.play.jitter * self.rng.random())
            self.rig.computed[-len(chosen) :] = []
            self.rig.compute(chosen, slots)  # nobody wrote into the slots meanwhile
            if leaves:
                raise Left

        self.rig.step(layer, *experts, compute=compute)

    def resize(self, stop: threading.Event) -> None:
        rng = random.Random(self.play.seed + 3)
        least = LAYERS if self.play.scope == "per-layer" else 1
        while not stop.is_set():
            try:
                self.rig.driver.resize(rng.randint(least, LAYERS * EXPERTS))
            except ClosedError:
                assert self.closing
                return
            stop.wait(0.002 * rng.random())


def perform(catalog, play: Play) -> Stage:
    """Run a play to its end and check what is left."""
    before, files = threads(), descriptors()
    stage = Stage(catalog, play)
    stop = threading.Event()

    def act() -> None:
        try:
            stage.run()
        finally:
            stop.set()

    in_time(act, *([lambda: stage.resize(stop)] if play.resizing else []))
    stage.rig.settle()
    stage.rig.check()
    in_time(stage.rig.driver.close)
    assert threads() <= before  # those of an earlier test may end meanwhile
    assert descriptors() <= files
    return stage


PREDICTORS = ["right", "wrong", "random"]
NAMED = [p.name for p in POLICIES.values() if not p.needs_trace]
LANES = [1, 2, (2, 1), (1, 2)]


@pytest.mark.parametrize("lanes", LANES, ids=str)
@pytest.mark.parametrize("predictor", PREDICTORS)
def test_delays(disk, predictor, lanes):
    stage = perform(disk(LAYERS, EXPERTS), Play(1, lanes=lanes, predictor=predictor))
    counts = stage.rig.scheduler.counts
    assert counts.prefetches > 0
    assert (counts.useful + counts.late > 0) or predictor == "wrong"


@pytest.mark.parametrize("lanes", LANES, ids=str)
@pytest.mark.parametrize("predictor", PREDICTORS)
def test_everything_goes_wrong(disk, predictor, lanes):
    play = Play(2, lanes=lanes, predictor=predictor, failing=0.05, leaving=0.05, resizing=True)
    stage = perform(disk(LAYERS, EXPERTS), play)
    assert stage.lost > 0


@pytest.mark.parametrize("lanes", LANES, ids=str)
@pytest.mark.parametrize("predictor", PREDICTORS)
def test_faults_while_a_worker_predicts(disk, predictor, lanes):
    play = Play(3, lanes=lanes, predictor=predictor, failing=0.05, leaving=0.05, resizing=True,
                worker=True, guard=True)  # fmt: skip
    perform(disk(LAYERS, EXPERTS), play)


@pytest.mark.parametrize("lanes", LANES, ids=str)
@pytest.mark.parametrize("resizing", [False, True])
@pytest.mark.parametrize("ahead", [0, 4])
def test_reads_between_requests(disk, ahead, resizing, lanes):
    play = Play(4, lanes=lanes, ahead=ahead, idle=0.5, capacity=20, failing=0.02, leaving=0.05,
                resizing=resizing)  # fmt: skip
    counts = perform(disk(LAYERS, EXPERTS), play).rig.scheduler.counts
    assert counts.idle > 0 or resizing  # whether one is used depends on the threads


def any_play(seed: int) -> Play:
    rng = random.Random(seed)
    scope = rng.choice(["shared", "per-layer"])
    return Play(
        seed,
        capacity=rng.randint(LAYERS if scope == "per-layer" else 1, LAYERS * EXPERTS),
        ahead=rng.choice([0, 1, 3, 8, 24]),
        lanes=rng.choice([1, 2, 3, (1, 1), (2, 1), (1, 2), (2, 2)]),
        scope=scope,
        named=rng.choice(NAMED),
        predictor=rng.choice([*PREDICTORS, "none"]),
        guard=rng.random() < 0.3,
        failing=rng.choice([0.0, 0.01, 0.1, 0.5]),
        leaving=rng.choice([0.0, 0.02, 0.2]),
        prompts=rng.choice([0.0, 0.1, 0.5]),
        resizing=rng.random() < 0.5,
        jitter=rng.choice([0.0, 0.0003, 0.002]),
        passes=rng.choice([10, 40, 80]),
        worker=rng.random() < 0.5,
        idle=rng.choice([0.0, 0.2, 1.0]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_any_play(disk, seed):
    perform(disk(LAYERS, EXPERTS), any_play(seed))
