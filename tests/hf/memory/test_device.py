"""Models with expert slots on a device and further experts in host memory.

The CPU stands in the GPU's place (`engine.Engine`); everything else is what runs with one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import greenroom
from greenroom.config import LoadConfig
from greenroom.errors import BudgetError, DeviceError, UsageError
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.load import resolve
from greenroom.hf.load.describe import Description
from greenroom.hf.memory import devices as places
from greenroom.hf.memory.budget import DeviceBudget, MemoryNeeds, host_slots
from greenroom.hf.memory.devices import kernel_fallback, kernels_of
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.host import HostMemory
from greenroom.runtime.memory.system import available_bytes, rss_bytes
from tests.models import cached_tiny, reference

GIB = 1 << 30


@contextmanager
def placed(name: str, monkeypatch, engine: Engine | None = None, **parts: Any) -> Iterator[Any]:
    """A tiny model in bfloat16 on the stand-in for a GPU."""
    monkeypatch.setattr(places, "engine_for", lambda parts, number: engine or Engine())
    skeleton = ModelSkeleton.of(cached_tiny(name, dtype="bfloat16"))
    model = skeleton.load()
    parts = {"kernels": "eager", "capacity": 3, **parts}
    model.greenroom = Greenroom(model, ModelSetup(skeleton.catalog, cuda=True, **parts))
    try:
        yield model
    finally:
        model.greenroom.detach()


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 300, shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("cached", [0, 4, 1000])
def test_the_bits_are_eager_s_however_many_experts_the_host_caches(cached, monkeypatch):
    options = {"max_new_tokens": 6, "do_sample": False}
    for name in ("qwen3_moe", "gpt_oss"):
        expected = reference(cached_tiny(name, dtype="bfloat16")).generate(ids(1, 7), **options)
        with placed(name, monkeypatch, host_capacity=min(cached, 24)) as model:
            assert torch.equal(model.generate(ids(1, 7), **options), expected)
            stats = model.greenroom.stats()
            assert [link["link"] for link in stats.links] == ["disk -> host", "host -> device"]
            disk, bus = (link["bytes"] for link in stats.links)
            if not cached:
                assert stats.host is None
                assert disk == bus
            else:
                assert stats.host["requests"] > stats.host["hits"] > 0
                assert disk < bus
            model.greenroom.reset_stats()
            assert not cached or model.greenroom.stats().host["requests"] == 0


@pytest.mark.interpreted
def test_the_triton_kernel_computes_from_slots_in_segments(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("greenroom.runtime.cuda.slots.SEGMENT_BYTES", 1)
    with (
        placed("qwen3_moe", monkeypatch, kernels="triton", capacity=5) as model,
        torch.inference_mode(),
    ):
        got = model(ids(1, 2)).logits
        model.greenroom.resize(4 * model.greenroom.setup.catalog.slot_bytes)
        assert torch.equal(model(ids(1, 2)).logits, got)
        theirs = reference(cached_tiny("qwen3_moe", dtype="bfloat16"))(ids(1, 2)).logits
    assert (got.float() - theirs.float()).abs().max() < 0.1 * theirs.abs().max()


class Broken(Engine):
    """A device that refuses the copies numbered in `bad`."""

    def __init__(self, *bad: int) -> None:
        self.bad, self.copies = bad, 0

    @contextlib.contextmanager
    def copying(self, after: Any) -> Iterator[None]:
        self.copies += 1
        if self.copies in self.bad:
            raise DeviceError("the GPU failed: CUDA error: an illegal memory access")
        yield


def test_a_copy_that_fails_ends_that_answer_alone(monkeypatch):
    engine, options = Broken(), {"max_new_tokens": 5, "do_sample": False}
    with placed("qwen3_moe", monkeypatch, engine, host_capacity=3) as model:
        expected = model.generate(ids(1, 4), **options)
        engine.bad = (engine.copies + 4,)
        with pytest.raises(DeviceError, match="illegal memory access") as caught:
            model.generate(ids(1, 4), **options)
        assert "\n" not in str(caught.value)
        assert torch.equal(model.generate(ids(1, 4), **options), expected)


def test_a_device_that_is_lost_fails_every_answer_and_hangs_none(monkeypatch):
    engine = Broken()
    with placed("qwen3_moe", monkeypatch, engine) as model:
        engine.bad = tuple(range(10_000))
        for _ in range(2):
            with pytest.raises(DeviceError):
                model.generate(ids(1, 4), max_new_tokens=2, do_sample=False)


def test_native_is_for_cpus_and_triton_for_gpus(monkeypatch, caplog):
    catalog = ModelSkeleton.of(cached_tiny("qwen3_moe")).catalog
    assert kernels_of(ModelSetup(catalog, 1)) == "native"
    with pytest.raises(UsageError, match="native runs on a CPU only"):
        kernels_of(ModelSetup(catalog, 1, cuda=True, kernels="native"))
    monkeypatch.setattr(places, "find_spec", lambda name: object())
    assert kernels_of(ModelSetup(catalog, 1, cuda=True)) == "triton"
    monkeypatch.setattr(places, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert kernels_of(ModelSetup(catalog, 1, cuda=True)) == "eager"
    assert "greenroom[gpu]" in caplog.text
    with pytest.raises(UsageError, match="--kernels triton needs a GPU"):
        resolve.on_a_gpu(LoadConfig(kernels="triton", device="cpu"))


def test_without_compiled_kernels_auto_is_eager_and_native_is_refused(no_kernels, caplog):
    catalog = ModelSkeleton.of(cached_tiny("qwen3_moe")).catalog
    reason = "compiled kernels were not built"
    assert kernels_of(ModelSetup(catalog, 1)) == "eager"
    assert kernel_fallback(ModelSetup(catalog, 1)) == reason
    for name in ("native", "rounded"):
        with pytest.raises(UsageError, match=reason):
            kernels_of(ModelSetup(catalog, 1, kernels=name))
    assert kernels_of(ModelSetup(catalog, 1, kernels="eager")) == "eager"
    assert kernel_fallback(ModelSetup(catalog, 1, kernels="eager")) == ""
    assert kernel_fallback(ModelSetup(catalog, 1, cuda=True)) == ""


def test_a_missing_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"--device cuda: .*use --device cpu"):
        resolve.on_a_gpu(LoadConfig(device="cuda"))
    assert not resolve.on_a_gpu(LoadConfig())
    with pytest.raises(UsageError, match="--host-memory needs a GPU"):
        resolve.on_a_gpu(LoadConfig(host_memory="1GiB"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve.on_a_gpu(LoadConfig())
    assert not resolve.on_a_gpu(LoadConfig(device="cpu"))


# ---- budgets, with readers in a GPU's place


@pytest.mark.parametrize(
    ("memory", "nbytes"),
    [
        (None, int(10 * GIB * 0.8)),
        ("auto", int(10 * GIB * 0.8)),
        ("50%", 5 * GIB),
        ("3GiB", 3 * GIB),
    ],
)
def test_memory_is_of_what_the_gpu_has_free_at_the_start(memory, nbytes):
    assert DeviceBudget(memory, lambda: (10 * GIB, 24 * GIB)).nbytes == nbytes


def test_memory_of_other_processes_cannot_be_requested():
    with pytest.raises(BudgetError, match="more than the GPU has free: 2 GiB of 24 GiB"):
        DeviceBudget("8GiB", lambda: (2 * GIB, 24 * GIB))


def test_a_gpu_that_is_too_small_is_refused_before_loading():
    skeleton = ModelSkeleton.of(cached_tiny("qwen3_moe"))
    budget = DeviceBudget("100MiB", lambda: (GIB, GIB))
    description = Description.of(skeleton, LoadConfig(context=64), on_a_gpu=True)
    with pytest.raises(
        BudgetError, match=r"of the GPU's memory, more than the budget of 100 MiB"
    ) as e:
        description.slot_budget(2, False, budget.nbytes, 2, label=DeviceBudget.LABEL)
    enough = int(str(e.value).rsplit("--memory ", 1)[1].split("MiB")[0]) << 20
    assert description.slot_budget(2, False, enough, 2).full_context_slots >= 2


def test_the_remaining_gpu_memory_becomes_slots():
    free = iter([10 * GIB, 7 * GIB])
    budget = DeviceBudget("5GiB", lambda: (next(free), 24 * GIB))
    need = budget.after(slots=GIB)
    assert need == MemoryNeeds(2 * GIB, 0, 0, 0, 0)
    assert budget.nbytes - need.total == 3 * GIB


def test_the_remaining_host_memory_caches_experts():
    catalog = ModelSkeleton.of(cached_tiny("qwen3_moe")).catalog
    budget, slots = host_slots(None, catalog, staging_slots=4)
    assert slots == catalog.experts
    assert 0 < budget <= 0.81 * (available_bytes() + rss_bytes())
    with pytest.raises(BudgetError, match="more than --host-memory 1MiB: ") as e:
        host_slots("1MiB", catalog, staging_slots=4)
    enough = str(e.value).rsplit("--host-memory ", 1)[1].split()[0]
    assert 0 <= host_slots(enough, catalog, staging_slots=4)[1] <= catalog.experts


def test_the_fake_device_caches_experts_in_host_memory_too():
    folder = str(cached_tiny("qwen3_moe", tokenizer=True))
    model, _ = greenroom.load(
        folder, cache="25%", device="fake", host_memory="4GiB", prefetch="off"
    )
    try:
        expected = reference(cached_tiny("qwen3_moe", tokenizer=True))
        options = {"max_new_tokens": 6, "do_sample": False}
        assert torch.equal(
            model.generate(ids(1, 5), **options), expected.generate(ids(1, 5), **options)
        )
        stats = model.greenroom.stats()
        assert stats.host["capacity"] == stats.experts
        assert stats.host["hits"] > 0
        assert model.greenroom.setup.host_bytes == 4 * GIB
    finally:
        model.greenroom.detach()


class Registering(Engine):
    """An engine that knows which memory is registered."""

    def __init__(self) -> None:
        self.registered = set[int]()

    def register(self, address: int, nbytes: int) -> str | None:
        self.registered.add(address)
        return None

    def unregister(self, address: int) -> None:
        self.registered.remove(address)


@pytest.mark.parametrize(
    ("at", "error"),
    [
        ("greenroom.runtime.cuda.slot_table.SlotTable.__init__", DeviceError("no room")),
        ("greenroom.runtime.cuda.host.HostMemory.pin", KeyboardInterrupt()),
        ("greenroom.runtime.driver.copier.Copier.__init__", RuntimeError("no more threads")),
    ],
)
def test_a_load_that_fails_leaves_no_memory_registered(at, error, monkeypatch):
    """The next load could get the same addresses, and be refused there."""
    pytest.importorskip("triton")
    engine, pin = Registering(), HostMemory.pin

    def fail(*given: Any) -> None:
        if at.endswith("pin"):
            pin(*given)
        assert engine.registered
        raise error

    def load() -> None:
        with placed("qwen3_moe", monkeypatch, engine, kernels="triton", host_capacity=24):
            pass

    monkeypatch.setattr(at, fail)
    with pytest.raises(type(error)):
        load()
    assert not engine.registered
