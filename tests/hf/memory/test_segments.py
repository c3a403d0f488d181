"""Slots of a GPU, which are freed in whole segments, within a budget; a CPU in the GPU's place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from greenroom.core.cache.pins import Pins, Task
from greenroom.core.cache.scope import Scope
from greenroom.core.config.scheduler import SchedulerConfig
from greenroom.core.events import Pinned
from greenroom.errors import BudgetError, DeviceError
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.history import split_counts
from greenroom.hf.kv.sizes import kv_bytes
from greenroom.hf.load.budget import least_slots
from greenroom.hf.memory.budget import MemoryNeeds, Workspace
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.memory.slot_budget import SlotBudget
from greenroom.hf.memory.split import split_experts
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.hf.pack.packing import pack
from greenroom.plan.configurator import TokenLatency
from greenroom.runtime.cuda.engine import Engine
from tests.models import cached_tiny

KEEP: list[TemporaryDirectory[str]] = []
pytestmark = pytest.mark.usefixtures("no_threads_left")


class Gpu(Engine):
    """A device with room for `most` bytes of slots."""

    most, held = 1 << 40, 0

    def empty(self, nbytes: int) -> torch.Tensor:
        if self.held + nbytes > self.most:
            raise DeviceError("the GPU has no room")
        self.held += nbytes
        return super().empty(nbytes)

    def free(self, memory: torch.Tensor) -> None:
        self.held -= memory.numel()
        super().free(memory)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Keys and values take slots of it every 32 tokens."""
    gpu = Gpu()
    for name in ("kv.cache.BLOCK", "kv.sizes.BLOCK", "memory.slot_budget.BLOCK"):
        monkeypatch.setattr(f"greenroom.hf.{name}", 32)
    for name in ("cache", "sizes"):
        monkeypatch.setattr(f"greenroom.hf.kv.{name}.FREED", 0)
    monkeypatch.setattr("greenroom.hf.memory.devices.engine_for", lambda parts, number=0: gpu)
    return gpu


def set_segments(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr("greenroom.runtime.cuda.slots.SEGMENT_BYTES", nbytes)
    monkeypatch.setattr("greenroom.runtime.cuda.slots.LEAST_SEGMENT_BYTES", 1)


def ids(count: int) -> torch.Tensor:
    return torch.randint(3, 300, (1, count), generator=torch.Generator().manual_seed(5))


@cache
def whole() -> Path:
    """Two layers of 8 experts."""
    return cached_tiny("qwen3_moe", tokenizer=True, max_position_embeddings=2048)


@cache
def packed() -> Path:
    """Four layers of 32 experts, in segments."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 128, "intermediate_size": 128}
    layers = {
        "num_experts": 32,
        "num_hidden_layers": 4,
        "mlp_only_layers": [],
        "max_position_embeddings": 2048,
    }
    source = cached_tiny("qwen3_moe", dtype="bfloat16", tokenizer=True, **sizes, **layers)
    KEEP.append(TemporaryDirectory(prefix="segments-"))
    pack(str(source), Path(KEEP[-1].name) / "pack", "same", segments=4)
    return Path(KEEP[-1].name) / "pack"


@contextmanager
def attached(
    setup: ModelSetup, skeleton: ModelSkeleton, slots: int, least: int, block: int
) -> Iterator[Any]:
    """A model with a budget that leaves so many slots with a full context, at least `least`."""
    model: Any = skeleton.load()
    model.greenroom = Greenroom(model, setup)
    try:
        sizes = kv_bytes(skeleton.model, "dynamic", block=block, room=setup.context, on_a_gpu=True)
        budget = SlotBudget(
            1 << 40, MemoryNeeds(0, 0, 0, 0, 0), setup.catalog, sizes, Workspace(0, 0, 0, 0),
            context=setup.context, block=block, min_slots=least, label=" on the GPU",
            release=lambda: None,
        )  # fmt: skip
        model.greenroom.use_slot_budget(budget.for_slots(slots))
        yield model
    finally:
        model.greenroom.detach()


@contextmanager
def split_model(scope: Scope, slots: int, **options: Any) -> Iterator[Any]:
    skeleton = ModelSkeleton.of(packed())
    catalog, split = split_experts(skeleton.catalog, 0.5, 2)
    setup = ModelSetup(
        catalog, 0, "lcp", scope, split, cuda=True, kernels="eager", context=1500, **options
    )
    least = least_slots(setup)
    with attached(replace(setup, capacity=least), skeleton, slots, least, block=64) as model:
        yield model


def whole_model(slots: int, least: int, capacity: int = 1, **options: Any) -> Any:
    skeleton = ModelSkeleton.of(whole())
    setup = ModelSetup(
        skeleton.catalog, capacity, cuda=True, kernels="eager", context=600, **options
    )
    return attached(setup, skeleton, slots, least, block=512)


@pytest.mark.parametrize("scope", ["per-layer", (1.0, 2.0, 3.0, 4.0)])
def test_keys_and_values_take_few_slots_of_pools_of_layers(
    scope: Scope, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment of 28 top segments would be most of a layer's pool, which has up to 32."""
    top = split_experts(ModelSkeleton.of(packed()).catalog, 0.5, 2)[1].tops[0]
    set_segments(monkeypatch, 28 * top)
    with split_model(scope, 40) as model, torch.no_grad():
        greenroom, slots = model.greenroom, set[int]()
        cache = model(ids(100)).past_key_values
        while cache.get_seq_length() < 1400:
            model(ids(100), past_key_values=cache)
            allowed, capacity = greenroom.slot_budget.full_slots(), greenroom.capacity
            assert 0.75 * allowed <= capacity <= allowed
            assert gpu.held <= allowed * greenroom.setup.catalog.slot_bytes
            slots.add(capacity)
        assert len(slots) > 2
        assert max(slots) < greenroom.driver.pieces.experts


def test_slots_that_are_divided_anew_take_no_more_memory(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that have fewer slots keep the memory of a segment that they use in part."""
    top = split_experts(ModelSkeleton.of(packed()).catalog, 0.5, 2)[1].tops[0]
    set_segments(monkeypatch, 28 * top)
    latency = TokenLatency(1e-3, 1e-3, 1e-3, 1.0)
    monkeypatch.setattr(split_counts, "latency_of", lambda driver, head: latency)
    monkeypatch.setattr(
        split_counts.Division, "__call__", lambda *_: (1.0, 2.0, 3.0, 4.0)
    )  # fmt: skip
    config = SchedulerConfig(tau=1, split="auto")
    with split_model("per-layer", 40, counts_split=True, config=config) as model:
        greenroom = model.greenroom
        before, equal = gpu.held, greenroom.driver.scheduler.view.group_sizes()
        for layer in range(4):
            greenroom._split_counts.activity.token(layer, np.array([0, 1]))
        greenroom.reconfigure()
        sizes = greenroom.driver.scheduler.view.group_sizes()
        assert sizes == sorted(sizes)
        assert sizes[0] < equal[0] < sizes[-1]
        assert gpu.held <= before


@pytest.mark.parametrize("pinned", [0, 8])
def test_a_segment_ends_at_the_fewest_slots(
    pinned: int, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 8 pinned experts, 7 slots are too few, where a segment of 6 would end."""
    slot = ModelSkeleton.of(whole()).catalog.slot_bytes
    set_segments(monkeypatch, 6 * slot)
    pins = None
    if pinned:
        catalog = ModelSkeleton.of(whole()).catalog
        pins = Pins({"a": Task(np.arange(pinned), np.ones(catalog.experts))}, catalog.offsets)
    with whole_model(10, pinned + 2, pins=pins) as model:
        model.greenroom.pin()
        for length in (5, 300, 500, 560, 590):
            model.generate(ids(length), max_new_tokens=2, do_sample=False)
        assert model.greenroom.capacity == (10 if pinned else 8)


def test_a_resize_that_pinned_experts_do_not_allow_changes_nothing(gpu: Gpu) -> None:
    with whole_model(10, 2) as model:
        driver = model.greenroom.driver
        driver.send(Pinned(np.arange(8)))
        before = driver.scheduler.capacity, driver.slots.capacity, gpu.held
        with pytest.raises(BudgetError, match="8 pinned experts leave none of 8"):
            driver.resize(8)
        assert (driver.scheduler.capacity, driver.slots.capacity, gpu.held) == before
        model.generate(ids(5), max_new_tokens=2, do_sample=False)


def test_a_resize_without_memory_leaves_the_budget_in_force(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = ModelSkeleton.of(whole()).catalog.slot_bytes
    set_segments(monkeypatch, slot)
    gpu.most = 12 * slot
    with whole_model(4, 2) as model:
        greenroom = model.greenroom
        before, budget = greenroom.capacity, greenroom.slot_budget
        with pytest.raises(DeviceError, match="no room"):
            greenroom.resize("100%")
        assert (greenroom.capacity, greenroom.slot_budget) == (before, budget)
        model.generate(ids(590), max_new_tokens=2, do_sample=False)
        assert greenroom.capacity == 4 < before
        assert greenroom.resize("50%") == 8
        assert greenroom.slot_budget is None
        model.generate(ids(590), max_new_tokens=2, do_sample=False)
        assert greenroom.capacity == 8
