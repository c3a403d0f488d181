"""Decoding on a GPU: the router's choice stays there, and the host waits for misses alone.

The CPU stands in the GPU's place, and Triton's interpreter runs the kernels.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.hf.memory.test_device import ids, placed

pytest.importorskip("triton")

from greenroom.errors import ClosedError, DeviceError, StoreError
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.slots import DeviceSlots
from greenroom.runtime.forward import BINDING
from greenroom.runtime.kernels.triton import TritonKernel
from greenroom.runtime.kernels.triton.kernel import Launch
from greenroom.runtime.slots.tier import ABSENT
from greenroom.runtime.store.disk import Staging

pytestmark = pytest.mark.interpreted


def decoded(name: str, on_host: bool, monkeypatch: Any, **parts: Any) -> tuple[Any, ...]:
    """Logits and counts of a few tokens, whose routing the host or the device reads first."""
    with monkeypatch.context() as patch:
        if on_host:
            patch.setattr(TritonKernel, "token_launches", lambda *_: None)
        return answered(name, on_host, patch, **parts)


def answered(name: str, on_host: bool, monkeypatch: Any, **parts: Any) -> tuple[Any, ...]:
    with placed(name, monkeypatch, kernels="triton", **parts) as model:
        if (graph := model.greenroom.bindings._graph) is not None:
            graph._refused = True  # its comparison of the first token serves experts again
        out = model.generate(
            ids(1, 3), max_new_tokens=4, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        driver, stats = model.greenroom.driver, model.greenroom.stats()
        assert all(
            (getattr(module, BINDING).token_launches is None) == on_host
            for module in model.greenroom.bindings.modules
        )
        counts = (
            stats.passes, stats.expert_requests, stats.expert_hits, driver.miss_counts.tolist(),
            driver.request_counts.tolist(), driver.scheduler.residents().tolist(),
            stats.host, [link["bytes"] for link in stats.links],
        )  # fmt: skip
        check_table(driver)
    return out.sequences, torch.stack(out.logits), counts


def check_table(driver: Any) -> None:
    """Check that the table names all residents, and slots that have an expert's own bytes.

    Predicted experts that are on their way arrive before the check or after it.
    """
    table, slots = driver.changes.table, driver.slots
    with driver.lock, table.lock:
        residents = set(driver.scheduler.residents().tolist())
        for expert, offset in enumerate(table.offsets.tolist()):
            slot = table.slot_of(expert)
            assert slot >= 0 or expert not in residents
            place = (slots.address(slot) - slots.address(0)) // 64 if slot >= 0 else ABSENT
            assert offset == place
            if slot < 0:
                continue
            again = DeviceSlots(Engine(), 1, slots.stride, 1)
            again.bytes(0)[:] = slots.bytes(slot)  # padding is not written
            for chunk in driver._copier._store.chunks(expert):
                data = driver._copier._store.read(chunk, Staging())
                again.write(0, chunk.extent.copies, data, chunk.start)
            assert torch.equal(again.bytes(0), slots.bytes(slot))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3_moe", {"capacity": 3}),
        ("qwen3_moe", {"capacity": 12, "prefetch": "markov", "guard": False}),
        ("qwen3_moe", {"capacity": 1000, "policy": "lru"}),
        ("qwen3_moe", {"capacity": 9, "host_capacity": 1000}),
        ("gpt_oss", {"capacity": 5, "host_capacity": 9}),
        ("gpt_oss", {"capacity": 5, "host_capacity": 1000, "policy": "next-use"}),
        ("deepseek_v3", {"capacity": 5}),
        ("gemma4_text", {"capacity": 5}),  # an activation of its own, between the products
    ],
    ids=str,
)
def test_bits_and_decisions_are_those_of_routing_on_the_host(name, options, monkeypatch):
    *expected, counts = decoded(name, True, monkeypatch, **options)
    *got, device_counts = decoded(name, False, monkeypatch, **options)
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one, other)
    if "prefetch" not in options:  # whose reads arrive in another order each time
        assert device_counts == counts


def test_experts_in_host_memory_take_no_other_thread(monkeypatch):
    with (
        placed("qwen3_moe", monkeypatch, kernels="triton", capacity=6, host_capacity=999) as model,
        torch.inference_mode(),
    ):
        tokens = ids(12, 1)
        for token in tokens:  # all that these need is in host memory then
            model(token[None])
        started = []
        driver = model.greenroom.driver
        monkeypatch.setattr(driver._copier, "start", started.append)
        misses, nbytes = driver.scheduler.view.misses, driver.meter.links[1].nbytes
        for token in tokens:
            model(token[None])
        new = driver.scheduler.view.misses - misses
        assert new > 0
        driver.end_pass()
        each = sum(chunk.length for chunk in driver._copier._store.chunks(0))
        assert driver.meter.links[1].nbytes - nbytes == new * each
        assert driver.meter.links[1].busy_s > 0
        assert driver.meter.stalls["miss"] > 0
        assert started == []
        check_table(driver)


class LateTimes(Engine):
    """An engine whose copies end long after they were launched, or are lost."""

    state = "running"

    def seconds_between(self, begin: Any, end: Any) -> float | None:
        if self.state == "lost":
            raise DeviceError("the GPU failed")
        return 1.0 if self.state == "ended" else None


def test_statistics_have_the_copies_that_end_after_a_pass(monkeypatch):
    engine = LateTimes()
    with placed(
        "qwen3_moe", monkeypatch, engine, kernels="triton", capacity=6, host_capacity=999
    ) as model:
        for token in ids(4, 1).repeat(2, 1):  # experts come from disk, then from host memory
            model(token[None])
        model.greenroom.driver.end_pass()
        pending = model.greenroom.driver.device_steps._loads._launched
        nbytes, count = sum(copies.nbytes for copies in pending), len(pending)
        before = model.greenroom.stats()
        assert nbytes > 0
        engine.state = "lost"
        assert model.greenroom.stats().links[1]["bytes"] == before.links[1]["bytes"]
        engine.state = "ended"
        after = model.greenroom.stats()
        assert after.links[1]["bytes"] - before.links[1]["bytes"] == nbytes
        assert model.greenroom.driver.meter.stalls["miss"] >= count


class ThreadStreams(Engine):
    """An engine whose threads have streams of their own."""

    def __init__(self) -> None:
        self.orders: list[tuple[Any, Any]] = []

    def current_stream(self) -> Any:
        return threading.current_thread().name

    def order(self, before: Any, after: Any) -> None:
        self.orders.append((before, after))


def test_a_prompt_on_another_stream_waits_for_copies_that_are_under_way(monkeypatch):
    """The scheduler takes them for complete; the host has not waited for them."""
    engine = ThreadStreams()
    with placed(
        "qwen3_moe", monkeypatch, engine, kernels="triton", capacity=6, host_capacity=999
    ) as model:
        for token in ids(3, 1):
            model(token[None])
        main, seen = threading.current_thread().name, list[Any]()
        kernel = next(iter(model.greenroom.bindings.modules))
        binding = getattr(kernel, BINDING)
        compute = type(binding.kernel).compute_group
        engine.orders.clear()

        def watched(self: Any, *arguments: Any) -> None:
            seen.append(list(engine.orders))
            compute(self, *arguments)

        monkeypatch.setattr(type(binding.kernel), "compute_group", watched)
        thread = threading.Thread(target=lambda: model(ids(1, 4)), name="another")
        thread.start()
        thread.join(60)
        assert seen[0][0] == (main, "another")


@pytest.mark.parametrize("error", [KeyboardInterrupt, DeviceError])
@pytest.mark.parametrize("at", [0, 1])
def test_copies_that_were_not_launched_leave_no_expert_behind(monkeypatch, error, at):
    with (
        placed("qwen3_moe", monkeypatch, kernels="triton", capacity=6, host_capacity=999) as model,
        torch.inference_mode(),
    ):
        tokens = ids(12, 1)
        expected = [model(token[None]).logits for token in tokens]
        driver, calls = model.greenroom.driver, []
        loads = driver.device_steps._loads
        copy = type(loads)._copy

        def fail(self: Any, *arguments: Any) -> Any:
            calls.append(arguments)
            if len(calls) > at:
                raise error("lost")
            return copy(self, *arguments)

        with monkeypatch.context() as failing:
            failing.setattr(type(loads), "_copy", fail)
            with pytest.raises(error):
                [model(token[None]) for token in tokens]
        assert driver.scheduler.step is None
        assert not driver.scheduler.placement.cache.state.pinned.any()
        for token, logits in zip(tokens, expected, strict=True):
            assert torch.equal(model(token[None]).logits, logits)
        check_table(driver)


@pytest.mark.parametrize("at", ["use", "undo"])
def test_a_scheduler_that_was_interrupted_is_not_used_again(monkeypatch, at):
    """It takes experts for resident whose bytes are in no slot."""
    with (
        placed("qwen3_moe", monkeypatch, kernels="triton", capacity=6, host_capacity=999) as model,
        torch.inference_mode(),
    ):
        tokens = ids(4, 1)
        for token in tokens:
            model(token[None])
        driver = model.greenroom.driver
        scheduler = driver.scheduler

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as failing:
            if at == "use":
                failing.setattr(scheduler.transfers.host, "use", interrupt)
            else:
                failing.setattr(type(driver.device_steps._loads), "_copy", interrupt)
                failing.setattr(scheduler.resident_steps, "undo", interrupt)
            with pytest.raises(KeyboardInterrupt):
                [model(token[None]) for token in tokens]
        with pytest.raises(ClosedError, match="unusable"):
            model(tokens[0][None])


def test_a_resize_between_tokens_changes_no_bit(monkeypatch):
    monkeypatch.setattr("greenroom.runtime.cuda.slots.SEGMENT_BYTES", 1)  # slots lie anywhere
    with (
        placed("qwen3_moe", monkeypatch, kernels="triton", capacity=24) as model,
        torch.inference_mode(),
    ):
        stride = model.greenroom.setup.catalog.slot_bytes
        tokens, logits = ids(6, 1), []
        for sizes in ([24], [7, 24, 3]):
            cache = model(ids(1, 3), use_cache=True).past_key_values
            for n, token in enumerate(tokens):
                model.greenroom.resize(sizes[n % len(sizes)] * stride)
                check_table(model.greenroom.driver)
                logits.append(model(token[None], past_key_values=cache, use_cache=True).logits)
        for one, other in zip(logits[:6], logits[6:], strict=True):
            assert torch.equal(one, other)


def test_a_device_that_reports_nothing_is_an_error(monkeypatch):
    with (
        placed("qwen3_moe", monkeypatch, kernels="triton", capacity=5) as model,
        torch.inference_mode(),
    ):
        model.greenroom.compile()
        model(ids(1, 1))
        with monkeypatch.context() as silent:
            silent.setattr(Launch, "start", lambda *_: None)
            with pytest.raises(DeviceError, match="has not reported"):
                model(ids(1, 1))


def test_a_read_that_fails_ends_that_token_alone(monkeypatch):
    with (
        placed("qwen3_moe", monkeypatch, kernels="triton", capacity=3) as model,
        torch.inference_mode(),
    ):
        expected = model(ids(1, 1)).logits
        store = model.greenroom.driver._copier._store
        with monkeypatch.context() as failing:

            def fail(*_: Any) -> None:
                raise StoreError("Input/output error")

            failing.setattr(store, "read", fail)
            with pytest.raises(StoreError, match="Input/output error"):
                model(ids(1, 2)[:, 1:])
        assert torch.equal(model(ids(1, 1)).logits, expected)
        check_table(model.greenroom.driver)
