"""A model whose experts are spread over several devices: the CPU in the places of two GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import pytest
import torch

import greenroom
from greenroom.config import LoadConfig, parse_device
from greenroom.errors import BudgetError, DeviceError, UnknownName, UsageError
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.load import resolve
from greenroom.hf.memory import devices as places
from greenroom.hf.memory.budget import MemoryNeeds, capacity_for
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.cuda.engine import Engine
from tests.hf.memory.test_device import Broken, ids
from tests.models import cached_tiny, reference

OPTIONS = {"max_new_tokens": 6, "do_sample": False}


@contextmanager
def spread(
    name: str, monkeypatch, engines: tuple[Engine, Engine] | None = None, **parts: Any
) -> Iterator[Any]:
    """A tiny model in bfloat16 with its experts over two stand-ins for GPUs."""
    both = engines or (Engine(), Engine())
    monkeypatch.setattr(places, "engine_for", lambda parts, number=0: both[number])
    skeleton = ModelSkeleton.of(cached_tiny(name, dtype="bfloat16"))
    model: Any = skeleton.load()
    parts = {"kernels": "eager", "capacity": 4, **parts}
    model.greenroom = Greenroom(
        model, ModelSetup(skeleton.catalog, cuda=True, devices=(0, 1), **parts)
    )
    try:
        yield model
    finally:
        model.greenroom.detach()


@pytest.mark.parametrize("cached", [0, 5])
def test_the_bits_are_those_of_one_device(cached, monkeypatch):
    for name in ("qwen3_moe", "gpt_oss"):
        expected = reference(cached_tiny(name, dtype="bfloat16")).generate(ids(1, 7), **OPTIONS)
        with spread(name, monkeypatch, host_capacity=cached) as model:
            assert torch.equal(model.generate(ids(1, 7), **OPTIONS), expected)
            links = {link["link"]: link["bytes"] for link in model.greenroom.stats().links}
            assert list(links) == ["disk -> host", "host -> cuda:0", "host -> cuda:1"]
            both = links["host -> cuda:0"], links["host -> cuda:1"]
            assert min(both) > 0.3 * sum(both)
            assert links["disk -> host"] == sum(both) or cached
            model.greenroom.resize(7 * model.greenroom.setup.catalog.slot_bytes)
            assert [s.capacity for s in model.greenroom.driver.slots.pools] == [4, 3]
            assert torch.equal(model.generate(ids(1, 7), **OPTIONS), expected)
            with pytest.raises(BudgetError, match="devices need at least one slot each"):
                model.greenroom.resize(model.greenroom.setup.catalog.slot_bytes)


@pytest.mark.interpreted
def test_the_triton_kernel_has_the_bits_of_one_device(monkeypatch):
    pytest.importorskip("triton")
    from tests.hf.memory.test_device import placed

    with placed("gpt_oss", monkeypatch, kernels="triton") as model, torch.inference_mode():
        expected = model(ids(1, 2)).logits
    with spread("gpt_oss", monkeypatch, kernels="triton") as model, torch.inference_mode():
        assert torch.equal(model(ids(1, 2)).logits, expected)


def test_one_device_that_fails_ends_that_answer_alone(monkeypatch):
    broken = Broken()
    with spread("qwen3_moe", monkeypatch, (Engine(), broken), host_capacity=4) as model:
        expected = model.generate(ids(1, 4), **OPTIONS)
        broken.bad = (broken.copies + 3,)
        with pytest.raises(DeviceError, match="illegal memory access"):
            model.generate(ids(1, 4), **OPTIONS)
        assert torch.equal(model.generate(ids(1, 4), **OPTIONS), expected)


def test_two_fake_devices_are_chosen_by_name():
    folder = str(cached_tiny("qwen3_moe", tokenizer=True))
    expected = reference(cached_tiny("qwen3_moe", tokenizer=True)).generate(ids(1, 5), **OPTIONS)
    for scope in ("shared", "per-layer"):
        model, _ = greenroom.load(folder, cache="50%", device="fake,fake", scope=scope)
        try:
            assert torch.equal(model.generate(ids(1, 5), **OPTIONS), expected)
            names = [link["link"] for link in model.greenroom.stats().links]
            assert names == ["disk -> host", "host -> fake:0", "host -> fake:1"]
        finally:
            model.greenroom.detach()


@pytest.mark.parametrize("cache", ["100%", "40%"])
def test_two_fake_devices_have_the_bits_of_one_with_the_compiled_kernels(cache):
    folder, outputs = str(cached_tiny("qwen3_moe", dtype="bfloat16", tokenizer=True)), []
    for device in ("cpu", "fake,fake"):
        model, _ = greenroom.load(folder, cache=cache, device=device, kernels="native")
        try:
            tokens = model.generate(ids(1, 5), **OPTIONS)
            with torch.inference_mode():
                outputs.append((tokens, model(tokens).logits))
        finally:
            model.greenroom.detach()
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][1], outputs[1][1])


def test_a_token_whose_experts_are_all_elsewhere_has_its_biases_once():
    """A compiled kernel with all of a token's experts computes their sum too."""
    folder, outputs = str(cached_tiny("gpt_oss", dtype="bfloat16", tokenizer=True)), []
    for device in ("cpu", "fake,fake"):
        model, _ = greenroom.load(folder, cache="100%", device=device, kernels="native")
        try:
            with torch.inference_mode():
                outputs.append(torch.cat([model(ids(6, 1)[i : i + 1]).logits for i in range(6)]))
        finally:
            model.greenroom.detach()
    assert torch.equal(outputs[0], outputs[1])


# ---- names and budgets


def test_device_options_are_parsed():
    assert parse_device("auto") == ("auto", (0,))
    assert parse_device("cuda") == ("cuda", (0,))
    assert parse_device("cuda:3") == ("cuda", (3,))
    assert parse_device("cuda:2, cuda:0") == ("cuda", (2, 0))
    assert parse_device("fake,fake,fake") == ("fake", (0, 1, 2))


@pytest.mark.parametrize(
    ("name", "error", "why"),
    [
        ("gpu", UnknownName, "unknown device 'gpu'"),
        ("cpu:1", UnknownName, "unknown device 'cpu:1'"),
        ("", UnknownName, "unknown device ''"),
        ("cuda:x", UsageError, "write the number of a GPU after cuda:"),
        ("cuda:-1", UsageError, "write the number of a GPU"),
        ("cuda:", UsageError, "write the number of a GPU"),
        ("cuda,cuda", UsageError, "several devices must all be GPUs with numbers"),
        ("cpu,cuda:0", UsageError, "several devices must all be GPUs"),
        ("cuda:0,fake", UsageError, "several devices must all be GPUs"),
        ("cuda:1,cuda:1", UsageError, "name each GPU only once"),
    ],
)
def test_wrong_device_options_are_refused(name, error, why):
    with pytest.raises(error, match=why) as caught:
        LoadConfig(device=name)
    assert "\n" not in str(caught.value)


def test_a_missing_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve.on_a_gpu(LoadConfig(device="cuda:0,cuda:1"))
    for name in ("cuda:7", "cuda:0,cuda:2"):
        with pytest.raises(
            DeviceError, match=rf"--device {name}: no such GPU; this machine has cuda:0, cuda:1"
        ):
            resolve.on_a_gpu(LoadConfig(device=name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"--device cuda:7: .*use --device cpu"):
        resolve.on_a_gpu(LoadConfig(device="cuda:7"))


def test_a_budget_is_of_each_gpu_and_slots_are_as_many_on_all():
    catalog = ModelSkeleton.of(cached_tiny("qwen3_moe")).catalog
    need, slot = MemoryNeeds(0, 1 << 20, 0, 0, 0), catalog.slot_bytes
    budget = need.total + 3 * slot + 5
    assert capacity_for(budget, need, catalog) == 3
    assert capacity_for(budget, need, catalog, devices=2) == 6
    # Whole layers on two GPUs, of which one has two of three: 3 slots of it, and 1.5 of the other.
    assert capacity_for(budget, need, catalog, devices=Fraction(3, 2)) == 4
    with pytest.raises(BudgetError, match="more than the budget of") as caught:
        capacity_for(budget, need, catalog, 8, devices=2)
    enough = int(str(caught.value).rsplit("--memory ", 1)[1].split("MiB")[0]) << 20
    assert capacity_for(enough, need, catalog, 8, devices=2) >= 8


# ---- a GPU that fails while it answers, wherever that is noticed


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeError("CUDA error: unspecified launch failure\nadvice"), "the GPU failed: CUDA"),
        (torch.OutOfMemoryError("CUDA out of memory.\nadvice"), "the GPU is out of memory"),
    ],
)
def test_an_answer_that_a_gpu_breaks_off_is_one_line_and_the_next_goes_on(error, why, monkeypatch):
    from greenroom.config import SamplingConfig
    from greenroom.hf.text.generate import answer

    model, tokenizer = greenroom.load(
        str(cached_tiny("qwen3_moe", tokenizer=True)), cache="50%", kernels="eager", device="fake"
    )
    sampling = SamplingConfig(max_new_tokens=3, temperature=0)
    try:
        expected = answer(model, tokenizer, "The green", sampling, context=64)
        for place in (model.greenroom.kernel, model.lm_head):  # in the experts, and elsewhere
            name = "compute_group" if place is model.greenroom.kernel else "forward"

            def fail(*_: Any, **__: Any) -> None:
                raise error

            with monkeypatch.context() as patch:
                patch.setattr(place, name, fail)
                with pytest.raises(DeviceError, match=why) as caught:
                    answer(model, tokenizer, "The green", sampling, context=64)
            assert "\n" not in str(caught.value)
            again = answer(model, tokenizer, "The green", sampling, context=64)
            assert again.token_ids == expected.token_ids
    finally:
        model.greenroom.detach()
