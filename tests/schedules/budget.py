"""Scenario of slots and KV caches that share a budget, while clients resize and memory is short."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from greenroom.core.cache.pressure import MemoryReading
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.attach.pass_hooks import PassHooks
from greenroom.hf.memory.budget import MemoryNeeds, Workspace
from greenroom.hf.memory.pressure import PressureWatcher
from greenroom.hf.memory.slot_budget import SlotBudget
from tests.hf.memory.sensor import PLENTY, SHORT, FakeSensor
from tests.schedules.driver import TRACED as DRIVER_FILES
from tests.schedules.driver import Workload, catalog
from tests.schedules.primitives import THREADS, point
from tests.schedules.runner import Scenario, run_threads

CONTEXT = 1024
FEWEST = 2  # slots beside a full context


class Attached(Greenroom):
    """An expert cache over a driver of a toy, with a budget and without a model."""

    def __init__(self, work: Workload) -> None:
        self.driver, self.rig = work.rig.driver, work.rig
        block = catalog().slot_bytes  # of 256 tokens
        sizes: Any = SimpleNamespace(
            held_bytes=lambda tokens, batch=1: tokens * block // 256 * batch,
            total_bytes=lambda tokens, batch=1, decodes=True: tokens * block // 256 * batch,
            update_bytes=lambda tokens, batch=1, decodes=True: 0,
            on_a_gpu=False, kind=SimpleNamespace(name="dynamic"),
        )  # fmt: skip
        self.setup: Any = SimpleNamespace(
            catalog=catalog(), keys_values=sizes, make_growing=lambda cache: None, cuda=False
        )
        bindings: Any = SimpleNamespace(variants=None, shared=None, check_weights=lambda: None)
        self._resize_lock, self._close = THREADS.Lock(), SimpleNamespace(alive=True)  # type: ignore
        self._fixed_slots, self.process_bytes = self.capacity, 0
        self._model = torch.nn.Identity  # type: ignore[assignment]
        self.hooks = PassHooks(self.setup, self.driver, bindings, [], None)
        budget = SlotBudget(
            1 << 40, MemoryNeeds(0, 0, 0, 0, 0), catalog(), sizes, Workspace(0, 0, 0, 0),
            context=CONTEXT, block=512, min_slots=1, release=lambda: None,
        ).for_slots(FEWEST)  # fmt: skip
        budget._lock = THREADS.Lock()  # type: ignore[assignment]
        budget.bind(self.driver, False)
        self.hooks.slot_budget = budget

    def compute(self, lengths: Iterable[int]) -> None:
        """Run passes with so many new tokens, in one KV cache."""
        cache, model = DynamicCache(), torch.nn.Identity()
        for number, length in enumerate(lengths):
            arguments = {
                "input_ids": torch.zeros(1, length, dtype=torch.int64),
                "past_key_values": cache,
            }
            self.hooks._on_pass_start(model, (), arguments)
            cache.update(*torch.zeros(2, 1, 1, length, 1), 0)
            self.rig.step(number % 2, 0, 1 + number % 4)
            self.hooks._on_pass_end(model, (), SimpleNamespace(past_key_values=cache))


def _play(random: Random) -> None:
    """Passes shrink and grow the cache until a client gives it a fixed size; memory gets short."""
    work = Workload(random)
    work.failing, work.rig.store._fails = 0.0, lambda read: False
    greenroom = Attached(work)
    is_short, resizes = random.random() < 0.5, random.random() < 0.7
    lengths = [random.choice((1, 1, 200, 300)) for _ in range(random.randint(2, 4))]
    share, size = random.choice((("25%", 3), ("50%", 6), ("100%", 12)))
    sensor = FakeSensor()
    watcher = PressureWatcher(
        greenroom.driver, catalog().slot_bytes, None, lambda: greenroom.slot_budget,
        greenroom._resize_lock, sensor=sensor,
    )  # type: ignore[arg-type]  # fmt: skip
    free = [random.choice((SHORT, PLENTY)) for _ in range(3)] if is_short else []

    def compute() -> None:
        greenroom.compute(lengths)

    def resize() -> None:
        assert greenroom.resize(share) == size

    def read_stats() -> None:
        for _ in range(4):
            assert (greenroom.memory_bytes or 0) > 0

    def report() -> None:
        for number, each in enumerate(free):
            point()
            sensor.readings.put(MemoryReading(10.0 * number, each, 0))

    run_threads(compute, report, read_stats, *([resize] if resizes else []))
    watcher.stop()
    capacity = greenroom.driver.scheduler.capacity
    if resizes:
        assert capacity == size, (capacity, size)  # from then on the size is fixed
    else:
        assert capacity >= 1
    work.end()


TRACED = (
    *DRIVER_FILES, "greenroom.hf.memory.pressure", "greenroom.hf.memory.slot_budget",
    "greenroom.hf.attach.attach", "greenroom.hf.attach.pass_hooks",
)  # fmt: skip
BUDGET = Scenario("budget", _play, TRACED, length=1500)
