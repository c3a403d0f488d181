"""An expert cache that gives memory back to other processes, and takes it again."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import greenroom
from greenroom.core.cache.pins import Pins, Task
from greenroom.core.cache.pressure import CALM_S, MemoryReading
from greenroom.errors import BudgetError, DeviceError, UsageError
from greenroom.hf.memory import pressure as module
from greenroom.hf.model.skeleton import ModelSkeleton
from tests.hf.memory.sensor import PATIENCE, PLENTY, SHORT, FakeSensor
from tests.models import cached_tiny


@pytest.fixture(scope="module")
def folder() -> Any:
    return cached_tiny("qwen3_moe", tokenizer=True, max_position_embeddings=2048)


@pytest.fixture
def sensor(monkeypatch: pytest.MonkeyPatch) -> FakeSensor:
    made = FakeSensor()
    monkeypatch.setattr(module, "PressureSensor", lambda: made)
    return made


@pytest.fixture
def load(folder: Any, sensor: FakeSensor) -> Iterator[Callable[..., Any]]:
    models = []

    def load(**options: Any) -> Any:
        model, _ = greenroom.load(str(folder), kernels="eager", context=64, **options)
        models.append(model)
        return model

    yield load
    for model in models:
        model.greenroom.detach()


def answer(model: Any) -> list[int]:
    ids = torch.randint(3, 300, (1, 9), generator=torch.Generator().manual_seed(2))
    tokens = model.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    return list(tokens[0].tolist())


@pytest.mark.parametrize("options", [{"memory": "60GiB"}, {"cache": "100%", "pressure": "on"}])
def test_the_cache_shrinks_to_its_fewest_slots_and_returns(
    load: Callable[..., Any], sensor: FakeSensor, options: dict[str, Any]
) -> None:
    model = load(**options)
    room, full = model.greenroom, model.greenroom.capacity
    grown = []
    room.on_growth = lambda: grown.append(room.capacity)
    expected = answer(model)
    sizes = [full]
    for _ in range(12):
        sensor.report(SHORT, 0.05)
        sizes.append(room.capacity)
        assert answer(model) == expected
    fewest = sizes[-1]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) > 3
    assert fewest == model.config.num_experts_per_tok
    assert room.driver.slots.capacity == fewest  # the memory has as many slots
    for _ in range(40):
        sensor.report(PLENTY, CALM_S)
    assert room.capacity == full
    assert answer(model) == expected
    assert grown == sorted(grown)
    assert grown[-1] == full
    counts = room.stats().pressure
    assert counts["shrinks"] + counts["growths"] == len(room.pressure.changes)
    assert counts["growths"] == len(grown)
    assert counts["released_bytes"] == (full - fewest) * room.setup.catalog.slot_bytes
    assert counts["cause"] == "only 0 B of memory was free"


@pytest.mark.parametrize("options", [{"cache": "100%", "pressure": "on"}, {"memory": "60GiB"}])
def test_every_layer_keeps_a_slot_beside_its_pinned_experts(
    load: Callable[..., Any],
    folder: Any,
    sensor: FakeSensor,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
) -> None:
    """Of nine slots in equal shares, the first layer has five: one beside four pinned experts."""
    offsets = ModelSkeleton.of(folder).catalog.offsets
    pins, task = tmp_path / "pins.json", Task(np.arange(4), np.ones(offsets[-1]))
    pins.write_text(json.dumps(Pins({"a": task}, tuple(offsets)).as_json()))
    model = load(scope="per-layer", pin=str(pins), **options)
    expected = answer(model)
    for _ in range(12):
        sensor.report(SHORT, 0.05)
    assert model.greenroom.capacity == 9
    assert not [each for each in caplog.records if "keeps its" in each.message]
    assert answer(model) == expected


def test_keys_and_values_take_slots_while_the_cache_is_limited(
    load: Callable[..., Any], sensor: FakeSensor
) -> None:
    model = load(memory="60GiB")
    room = model.greenroom
    full = room.capacity
    for _ in range(3):
        answer(model)  # fills the slots
    sensor.report(SHORT)
    limited = room.capacity
    assert 4 < limited < full
    answer(model)  # every pass asks for room
    assert room.capacity == limited
    gc.collect()
    budget = room.slot_budget
    others = budget._needs(budget._other_caches(()), 1, 64, 64).total
    most = budget.budget - others  # for further keys and values
    budget.reserve(most - (limited - 2) * room.setup.catalog.slot_bytes)
    assert room.capacity == limited - 2
    with pytest.raises(BudgetError):
        budget.reserve(most)
    budget.reserve(0)
    assert room.capacity == limited
    for _ in range(30):
        sensor.report(PLENTY, CALM_S)
    assert room.capacity == full


def test_slots_that_keys_and_values_left_free_are_not_taken_without_a_shortage(
    load: Callable[..., Any], sensor: FakeSensor
) -> None:
    room = load(memory="60GiB").greenroom
    full = room.capacity
    assert full == room.slot_budget.full_slots()
    room.driver.resize(full - 1)  # less than the gain for which the budget adds slots
    for _ in range(3):
        sensor.report(PLENTY, CALM_S)
    assert room.capacity == full - 1
    assert not room.pressure.changes


def test_a_fixed_size_stays_unless_pressure_is_on(load: Callable[..., Any]) -> None:
    for options in ({"cache": "50%"}, {"cache": "50%", "pressure": "off"},
                    {"memory": "60GiB", "pressure": "off"}):  # fmt: skip
        model = load(**options)
        assert model.greenroom.pressure is None
        assert model.greenroom.stats().pressure is None


@pytest.mark.parametrize("pressure", ["auto", "on"])
def test_a_size_that_the_user_sets_later_is_the_new_full_size(
    load: Callable[..., Any], sensor: FakeSensor, pressure: str
) -> None:
    model = load(memory="60GiB", pressure=pressure)
    room = model.greenroom
    sensor.report(SHORT)
    slots = room.resize("50%")
    assert slots == room.capacity == room.setup.catalog.experts // 2
    if pressure == "auto":  # a fixed size is not changed, so the thread ends
        sensor.readings.put(MemoryReading(9.0, SHORT, 0))
        room.pressure._thread.join(PATIENCE)
        assert sensor.closed
        assert room.capacity == slots
        return
    sensor.report(SHORT)
    assert room.capacity < slots
    for _ in range(30):
        sensor.report(PLENTY, CALM_S)
    assert room.capacity == slots


def test_slots_are_given_back_between_the_layers_of_an_answer(
    load: Callable[..., Any], sensor: FakeSensor
) -> None:
    """The reading comes while a layer's experts are computed: the resize waits for its end."""
    model = load(memory="60GiB")
    room = model.greenroom
    full, expected = room.capacity, answer(model)
    modules, calls = room.bindings.modules, []
    kernel = modules[1].forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not calls:
            sensor.now += 1
            sensor.readings.put(MemoryReading(sensor.now, SHORT, 0))
        calls.append(room.capacity)
        return kernel(*args, **kwargs)

    modules[1].forward = forward
    try:
        assert answer(model) == expected
    finally:
        del modules[1].forward
    assert sensor.handled.acquire(timeout=PATIENCE)
    assert room.capacity < full


def test_the_thread_ends_with_the_model(load: Callable[..., Any], folder: Any) -> None:
    model, _ = greenroom.load(str(folder), memory="60GiB", kernels="eager", context=64)
    thread = model.greenroom.pressure._thread
    assert thread.is_alive()
    del model
    until = time.monotonic() + PATIENCE
    while thread.is_alive() and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    assert not thread.is_alive()


def test_the_exit_of_a_forked_child_leaves_the_thread_alone(
    load: Callable[..., Any], sensor: FakeSensor
) -> None:
    room = load(memory="60GiB").greenroom
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.os, "getpid", lambda: -1)  # as in the child
        room.pressure.stop()
    assert sensor.readings.empty()
    sensor.report(SHORT)
    assert room.stats().pressure["shrinks"] == 1


def test_what_fails_once_is_tried_again(
    load: Callable[..., Any], sensor: FakeSensor, caplog: pytest.LogCaptureFixture
) -> None:
    room = load(memory="60GiB").greenroom
    full = room.capacity
    sensor.error = OSError("no file")
    for _ in range(2):
        sensor.report(SHORT)
    assert room.capacity == full
    assert len([each for each in caplog.records if each.exc_info]) == 1
    sensor.error, sensor.unreadable = None, True
    sensor.report(SHORT)
    assert room.capacity == full
    sensor.unreadable = False
    sensor.report(SHORT)
    assert room.capacity < full
    room.on_growth = lambda: 1 / 0
    for _ in range(40):
        sensor.report(PLENTY, CALM_S)
    assert room.capacity == full


def test_a_thread_that_cannot_go_on_lifts_the_limit(
    load: Callable[..., Any], sensor: FakeSensor
) -> None:
    room = load(memory="60GiB").greenroom
    full = room.capacity
    sensor.report(SHORT)
    assert room.capacity < full
    sensor.wait_error = OSError("no file")
    sensor.readings.put(MemoryReading(9.0, SHORT, 0))
    room.pressure._thread.join(PATIENCE)
    assert sensor.closed
    assert room.capacity == full


def test_on_growth_runs_after_the_lock_is_released(
    load: Callable[..., Any], sensor: FakeSensor
) -> None:
    room = load(memory="60GiB").greenroom
    sensor.report(SHORT)
    held = []
    room.on_growth = lambda: held.append(room._resize_lock.locked())
    sensor.report(PLENTY, CALM_S)
    assert held == [False]


def test_a_resize_that_fails_again_and_again_warns_once(
    load: Callable[..., Any],
    sensor: FakeSensor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    room = load(memory="60GiB").greenroom
    full = room.capacity
    for _ in range(8):
        sensor.report(SHORT)
    fewest = room.capacity

    def fail(slots: int) -> None:
        raise DeviceError("no memory for slots")

    with monkeypatch.context() as patch:
        patch.setattr(room.driver, "resize", fail)
        for _ in range(6):
            sensor.report(PLENTY, CALM_S)
        assert len([each for each in caplog.records if "keeps its" in each.message]) == 1
        assert room.capacity == fewest
        assert room.slot_budget.limited
    for _ in range(40):
        sensor.report(PLENTY, CALM_S)
    assert room.capacity == full


def test_the_cause_tells_waiting_from_a_limit(load: Callable[..., Any], sensor: FakeSensor) -> None:
    model = load(memory="60GiB")
    for _ in range(3):
        answer(model)  # fills the slots
    room = model.greenroom
    for stalled, at_limit, words in (
        (False, True, ", and a cgroup was at its limit"),
        (True, True, ", and processes waited for memory"),
    ):
        sensor.now += 1
        sensor.readings.put(MemoryReading(sensor.now, SHORT, 0, stalled, at_limit))
        assert sensor.handled.acquire(timeout=PATIENCE)
        assert room.stats().pressure["cause"] == "only 0 B of memory was free" + words


def test_a_watcher_that_cannot_start_closes_its_sensor(
    load: Callable[..., Any], sensor: FakeSensor
) -> None:
    sensor.error = OSError("no file")
    with pytest.raises(OSError, match="no file"):
        load(memory="60GiB")
    assert sensor.closed


def test_a_closed_cache_is_left_alone(load: Callable[..., Any], sensor: FakeSensor) -> None:
    model = load(memory="60GiB")
    model.greenroom.driver.close()
    sensor.readings.put(MemoryReading(1.0, SHORT, 0))
    model.greenroom.pressure._thread.join(PATIENCE)
    assert not model.greenroom.pressure._thread.is_alive()
    model.greenroom.pressure.stop()


def test_another_value_of_the_option_is_refused(folder: Any) -> None:
    with pytest.raises(UsageError, match="auto, on, off"):
        greenroom.load(str(folder), pressure="always")
