"""Devices that are added to a running model, and taken from it: several fake ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import greenroom
from greenroom.config import LoadConfig
from greenroom.errors import BudgetError, ClosedError, DeviceError, UsageError
from greenroom.runtime.fakes import FakeSlots
from tests.hf.memory.test_device import ids
from tests.hf.memory.test_split import packed, source
from tests.models import cached_tiny, reference
from tests.options import needs_option

OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
THREE = {"device": "fake,fake,fake", "spare_devices": 1}


@contextmanager
def loaded(**options: Any) -> Iterator[Any]:
    folder = str(cached_tiny("qwen3_moe", tokenizer=True))
    model, _ = greenroom.load(folder, kernels="eager", **options)
    try:
        yield model
    finally:
        model.greenroom.detach()


def expected(tokens: int = 6) -> torch.Tensor:
    model = reference(cached_tiny("qwen3_moe", tokenizer=True))
    return model.generate(ids(1, 5), **{**OPTIONS, "max_new_tokens": tokens})


def slots(model: Any) -> list[int]:
    return [pool.capacity for pool in model.greenroom.driver.slots.pools]


@pytest.mark.parametrize(
    "options", [{"cache": "50%"}, {"cache": "50%", "scope": "per-layer"},
                {"cache": "50%", "host_memory": "8GiB"}, {"cache": "50%", "policy": "s3fifo"}]
)  # fmt: skip
def test_devices_come_and_go_and_the_text_stays(options: dict[str, Any]) -> None:
    with loaded(**THREE, **options) as model:
        assert slots(model) == [4, 4, 0]  # half of 16 experts on two devices
        for device, each in (("fake,fake,fake", [4, 4, 4]), ("fake", [4, 0, 0]),
                             ("fake,fake", [4, 4, 0]), ("fake,fake", [4, 4, 0])):  # fmt: skip
            assert model.greenroom.use_devices(device) == sum(each) == model.greenroom.capacity
            assert slots(model) == each
            assert model.greenroom.devices == [f"fake:{n}" for n, size in enumerate(each) if size]
            assert torch.equal(model.generate(ids(1, 5), **OPTIONS), expected())
        links = {each["link"]: each["bytes"] for each in model.greenroom.stats().links}
        assert min(links.values()) > 0


@pytest.mark.parametrize(
    "options", [{"cache": "50%"}, {"cache": "50%", "scope": "per-layer"}, {"memory": "2GiB"}]
)  # fmt: skip
def test_whole_layers_move_when_devices_come_and_go(options: dict[str, Any]) -> None:
    """Three layers of 8 experts on one or two devices: the second one has layers 1 and 2."""
    folder = cached_tiny("qwen3_moe", tokenizer=True, num_hidden_layers=3, mlp_only_layers=[])
    want = reference(folder).generate(ids(1, 5), **OPTIONS)
    model, _ = greenroom.load(
        str(folder), kernels="eager", device="fake,fake", spare_devices=1,
        device_placement="layers", **options,
    )  # fmt: skip
    try:
        driver = model.greenroom.driver
        sizes = {1: [12, 0], 2: [6, 12]} if "cache" in options else {1: [24, 0], 2: [8, 16]}
        for count in (1, 2, 1, 2):
            model.greenroom.use_devices(",".join(["fake"] * count))
            assert driver.pieces.home_device[::8].tolist() == ([0] * 3 if count == 1 else [0, 1, 1])
            assert slots(model) == sizes[count]
            assert torch.equal(model.generate(ids(1, 5), **OPTIONS), want)
    finally:
        model.greenroom.detach()


def test_more_devices_than_layers_cannot_have_whole_ones() -> None:
    with loaded(**THREE, cache="50%", device_placement="layers") as model:
        with pytest.raises(UsageError, match="2 MoE layers can be placed on 1 to 2 devices, not 3"):
            model.greenroom.use_devices("fake,fake,fake")
        assert slots(model) == [4, 4, 0]
        assert torch.equal(model.generate(ids(1, 5), **OPTIONS), expected())


def test_a_placement_needs_several_devices() -> None:
    with pytest.raises(UsageError, match="--device-placement layers needs several GPUs: name them"):
        LoadConfig(device="cuda", device_placement="layers")


@pytest.mark.parametrize(
    "options",
    [{"split": "0.25,1", "scope": "per-layer"},
     pytest.param({"miss_precision": "int4", "low_below": 0.5},
                  marks=needs_option("miss_precision"))],
    ids=["segments", "copies"],
)  # fmt: skip
def test_devices_come_and_go_with_parts_of_experts(options: dict[str, Any]) -> None:
    """Each device has slots for its bottom segments or copies, too."""
    folder = packed()
    if "split" not in options:
        from tests.hf.memory.test_precision import with_copies

        folder = with_copies("int8", "int4")
    model, _ = greenroom.load(
        str(folder), kernels="eager", **THREE, cache="75%", prefetch="off", **options
    )
    try:
        exact = len(slots(model)) // 3 - 1  # kinds of slots but the last
        for device in ("fake,fake,fake", "fake", "fake,fake", "fake,fake,fake"):
            model.greenroom.use_devices(device)
            each = [slots(model)[kind * 3 : kind * 3 + 3] for kind in range(exact + 1)]
            count = device.count("fake")
            assert all(min(of[:count]) > 0 and sum(of[count:]) == 0 for of in each)
            answer = model.generate(ids(1, 5), **OPTIONS)
            if "split" in options:
                exactly = reference(source(), torch.bfloat16)
                assert torch.equal(answer, exactly.generate(ids(1, 5), **OPTIONS))
        stats = model.greenroom.stats()
        assert stats.split if "split" in options else stats.approximated["low"]
    finally:
        model.greenroom.detach()


def test_a_device_that_went_gets_no_expert() -> None:
    with loaded(**THREE, cache="50%") as model:
        model.greenroom.use_devices("fake")
        model.greenroom.reset_stats()
        model.generate(ids(1, 5), **OPTIONS)
        links = {each["link"]: each["bytes"] for each in model.greenroom.stats().links}
        assert links["host -> fake:0"] > 0
        assert links["host -> fake:1"] == links["host -> fake:2"] == 0


def test_experts_whose_device_stays_are_not_read_again() -> None:
    with loaded(device="fake,fake", spare_devices=1, cache="100%") as model:
        model.generate(ids(1, 5), **OPTIONS)
        residents = set(model.greenroom.driver.scheduler.residents().tolist())
        model.greenroom.use_devices("fake,fake")
        after = set(model.greenroom.driver.scheduler.residents().tolist())
        home = model.greenroom.driver.pieces.home_device
        assert after == {piece for piece in residents if home[piece] == 0} < residents
        model.greenroom.reset_stats()
        assert torch.equal(model.generate(ids(1, 5), **OPTIONS), expected())
        links = {each["link"]: each["bytes"] for each in model.greenroom.stats().links}
        assert links["host -> fake:0"] <= links["host -> fake:1"]


def test_devices_change_while_answers_run() -> None:
    with loaded(**THREE, cache="50%") as model:
        stop, errors = threading.Event(), list[BaseException]()

        def change() -> None:
            number = 0
            while not stop.is_set():
                try:
                    model.greenroom.use_devices(",".join(["fake"] * (number % 3 + 1)))
                except BaseException as error:
                    errors.append(error)
                    return
                number += 1

        thread = threading.Thread(target=change)
        thread.start()
        try:
            for _ in range(3):
                text = model.generate(ids(1, 5), **{**OPTIONS, "max_new_tokens": 24})
                assert torch.equal(text, expected(24))
        finally:
            stop.set()
            thread.join()
        assert errors == []


def test_a_budget_of_host_memory_keeps_its_slots() -> None:
    with loaded(**THREE, memory="2GiB") as model:
        assert slots(model) == [8, 8, 0]
        model.greenroom.use_devices("fake,fake,fake")
        assert sum(slots(model)) == 16
        model.greenroom.use_devices("fake")
        assert slots(model) == [16, 0, 0]
        assert torch.equal(model.generate(ids(1, 5), **OPTIONS), expected())


def test_a_resize_between_counts_for_each_device() -> None:
    with loaded(**THREE, cache="50%") as model:
        model.greenroom.resize("25%")
        assert slots(model) == [2, 2, 0]
        assert model.greenroom.use_devices("fake,fake,fake") == 6


def test_a_device_without_memory_is_refused_and_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with loaded(**THREE, cache="50%") as model:
        trim = FakeSlots.trim

        def full(self: FakeSlots, capacity: int) -> None:
            if capacity > self.capacity == 0:
                raise DeviceError("the GPU is out of memory")
            trim(self, capacity)

        with monkeypatch.context() as patch:
            patch.setattr(FakeSlots, "trim", full)
            with pytest.raises(DeviceError, match="the GPU is out of memory"):
                model.greenroom.use_devices("fake,fake,fake")
        assert slots(model) == [4, 4, 0]
        assert model.greenroom.devices == ["fake:0", "fake:1"]
        assert torch.equal(model.generate(ids(1, 5), **OPTIONS), expected())


def test_pinned_experts_that_would_fill_a_device_are_refused() -> None:
    with loaded(**THREE, cache="50%") as model:
        view, driver = model.greenroom.driver.scheduler.view, model.greenroom.driver
        home = driver.pieces.on_devices([0]).home_device
        from greenroom.core.events import Pinned

        driver.send(Pinned((home == 0).nonzero()[0][:6]))
        with pytest.raises(BudgetError, match="pinned experts leave none of 4 cache slots"):
            model.greenroom.use_devices("fake")
        assert len(view.pieces.active_devices) == 2
        assert torch.equal(model.generate(ids(1, 5), **OPTIONS), expected())


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("cpu", "devices cpu: this model was loaded on fake:0, fake:1, fake:2"),
        ("cuda:0,cuda:1", "this model was loaded on fake:0, fake:1, fake:2"),
        ("fake,fake,fake,fake", "this model was loaded on fake:0, fake:1, fake:2"),
    ],
)
def test_other_devices_are_refused(device: str, why: str) -> None:
    with loaded(**THREE, cache="50%") as model:
        with pytest.raises(UsageError, match=why):
            model.greenroom.use_devices(device)
        assert slots(model) == [4, 4, 0]


def test_a_model_on_one_device_and_a_detached_one_are_refused() -> None:
    with loaded(device="fake", cache="50%") as model:
        assert model.greenroom.devices == ["fake:0"]
        with pytest.raises(UsageError, match="loaded on one device: name all devices"):
            model.greenroom.use_devices("fake")
        model.greenroom.detach()
        with pytest.raises(ClosedError, match="was detached"):
            model.greenroom.use_devices("fake")


def test_the_first_device_cannot_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    from greenroom.hf.attach import devices

    with loaded(**THREE, cache="50%") as model:
        monkeypatch.setattr(devices, "parse_device", lambda device: ("fake", (1, 2)))
        with pytest.raises(UsageError, match="fake:0 has the dense parts: name it too"):
            model.greenroom.use_devices("fake:1,fake:2")


def test_as_many_spare_devices_as_devices_are_refused() -> None:
    with pytest.raises(UsageError, match="--spare-devices 2: --device fake,fake must name more"):
        LoadConfig(device="fake,fake", spare_devices=2)
    with pytest.raises(UsageError, match="--spare-devices 1: --device auto must name more"):
        LoadConfig(spare_devices=1)
