"""What works on a CPU works on a GPU: on emulated ones, with the same tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import greenroom
from greenroom.config import LoadConfig
from greenroom.hf.load import budget as load_budget
from greenroom.hf.load.report import startup_line
from greenroom.hf.memory import slots as memory_slots
from greenroom.hf.pack.packing import pack
from greenroom.runtime.cuda import slots
from greenroom.runtime.slots import block_fields
from tests import gguf_models
from tests.emulated_gpu import EmulatedGpu, emulated_gpus
from tests.hf.memory.test_precision import with_copies
from tests.hf.memory.test_split import packed, source
from tests.models import cached_tiny
from tests.options import needs_option

KEEP = TemporaryDirectory(prefix="on-a-gpu-")
ONE, TWO = "cuda", "cuda:0,cuda:1"
TOKENS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": -1}
FEW: dict[str, Any] = {"cache": "30%", "prefetch": "off"}


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch, no_threads_left: None) -> Iterator[None]:
    emulated_gpus(monkeypatch)
    with sdpa_kernel(SDPBackend.MATH):  # the CPU's own kernel rounds otherwise
        yield


def tiny(**options: Any) -> Path:
    return cached_tiny("qwen3_moe", dtype="bfloat16", tokenizer=True, **options)


def biased() -> Path:
    return cached_tiny("gpt_oss", dtype="bfloat16", tokenizer=True)


@cache
def encoded(kind: str) -> Path:
    folder = Path(KEEP.name) / kind
    pack(str(source(inner=64)), folder, kind)
    return folder


@cache
def gguf(kind: str) -> Path:
    return gguf_models.write(Path(KEEP.name) / f"{kind}.gguf", "qwen3_moe", {"": kind})


def generated(folder: Path, device: str, **options: Any) -> tuple[list[int], Any]:
    """Tokens after two prompts, of which the second is longer, and the statistics."""
    options = {"kernels": "eager", **options}
    if device == "cpu":
        options.pop("host_memory", None)
    model, _ = greenroom.load(str(folder), device=device, **options)
    try:
        assert (model.device.type == "cpu") == (device not in (ONE, TWO))
        found: list[int] = []
        for length in (7, 30):
            generator = torch.Generator().manual_seed(length)
            ids = torch.randint(3, 250, (1, length), generator=generator).to(model.device)
            found += model.generate(ids, **TOKENS)[0, length:].tolist()
        return found, model.greenroom.stats()
    finally:
        model.greenroom.detach()


ON_CPU: dict[str, list[int]] = {}


def expected(folder: Path, options: dict[str, Any], device: str = "cpu") -> list[int]:
    """The tokens of a run whose slots are in main memory; of exact runs, whatever the cache."""
    key = f"{folder} {device} {sorted(options.items())}"
    if key not in ON_CPU:
        ON_CPU[key] = generated(folder, device, **options)[0]
    return ON_CPU[key]


EXACT: dict[str, tuple[Any, dict[str, Any]]] = {
    "host tier": (tiny, {**FEW, "host_memory": "8GiB"}),
    "next-gate": (tiny, {"cache": "50%", "prefetch": "next-gate", "no_guard": True}),
    "per layer": (tiny, {**FEW, "cache": "50%", "scope": "per-layer", "disk_tables": "1KiB"}),
    "policy with weights": (tiny, {**FEW, "policy": "hybrimoe", "demand_order": "hottest"}),
    "bf12 pack": (lambda: encoded("bf12"), {**FEW, "host_memory": "8GiB"}),
    "nested copies": (lambda: with_copies("int8", "int4"), {**FEW, "host_memory": "8GiB"}),
    "Q4_K": (lambda: gguf("Q4_K"), FEW),
    "segments in one slot": (packed, FEW),
    "biases": (biased, {**FEW, "host_memory": "8GiB", "co_compute": "auto"}),
}


ON_TWO = "host tier", "next-gate", "biases", "nested copies", "bf12 pack", "Q4_K"
ON_TWO += ("segments in one slot",)
PLACED = "host tier", "next-gate", "biases", "per layer"


@pytest.mark.parametrize(
    ("name", "device"), [*((name, ONE) for name in EXACT), *((name, TWO) for name in ON_TWO)]
)
def test_exact_options_have_the_tokens_of_a_cpu(name: str, device: str) -> None:
    make, options = EXACT[name]
    folder = make()
    tokens, stats = generated(folder, device, **options)
    assert tokens == expected(folder, {"cache": "100%"})
    links = [link["link"] for link in stats.links]
    assert len(links) == len(device.split(",")) + 1
    assert stats.expert_requests > 0
    if name == "next-gate":
        assert stats.prefetch["useful"] > 0


@pytest.mark.parametrize("name", PLACED)
def test_whole_layers_on_each_gpu_have_the_tokens_of_a_cpu(name: str) -> None:
    make, options = EXACT[name]
    tokens, stats = generated(make(), TWO, **options, device_placement="layers")
    assert tokens == expected(make(), {"cache": "100%"})
    *_, first, second = (link["bytes"] for link in stats.links)
    assert min(first, second) > 0


def test_the_placement_is_planned_by_the_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of a few KiB: a visit to a second GPU takes longer than anything else."""
    whole = r"· whole layers on each GPU: a token's experts take about"
    unknown = r"· layers' experts spread, since RTX 1 is not among `greenroom list --gpus`"
    for name, shown, size in (
        ("NVIDIA H100 80GB HBM3", whole, {"cache": "100%"}),
        ("NVIDIA GeForce RTX 4090", whole, {"memory": "1GiB", "context": 64}),
        ("RTX 1", unknown, {"cache": "100%"}),
    ):
        options: dict[str, Any] = {"kernels": "eager", "device": TWO, **size}
        monkeypatch.setattr(EmulatedGpu, "name", name)
        model, _ = greenroom.load(str(tiny()), **options)
        try:
            home = model.greenroom.driver.pieces.home_device.tolist()
            assert (home == [0] * 8 + [1] * 8) == ("whole" in shown)
            assert model.greenroom.capacity == 16
            config = LoadConfig(**options)
            assert re.search(shown, startup_line("tiny", model, config, verbose=True))
            short = startup_line("tiny", model, config)
            assert ("whole layers on each GPU" in short) == ("whole" in shown)
        finally:
            model.greenroom.detach()


@pytest.mark.parametrize(
    ("kv", "device"), [("int8", TWO), ("int4", ONE), ("offloaded", ONE), ("offloaded", TWO)]
)
def test_other_keys_and_values_have_the_tokens_of_a_cpu(kv: str, device: str) -> None:
    tokens, _ = generated(tiny(), device, **FEW, kv=kv)
    on_cpu = {} if kv == "offloaded" else {"kv": kv}
    assert tokens == expected(tiny(), {"cache": "100%", **on_cpu})


INEXACT: dict[str, tuple[Any, dict[str, Any]]] = {
    "low-precision misses": (
        lambda: with_copies("same", "int4"), {"miss_precision": "int4", "low_below": 0.8},
    ),
    "nested copies": (
        lambda: with_copies("int8", "int4"), {"miss_precision": "int4", "low_below": 0.8},
    ),
    "skipped misses": (tiny, {"skip_below": 0.5}),
    "substitutes": (tiny, {"cache": "50%", "substitute_below": 0.5}),
}  # fmt: skip


@pytest.mark.parametrize("device", [ONE, TWO])
@pytest.mark.parametrize("name", INEXACT)
def test_inexact_misses_have_the_tokens_of_a_cpu(name: str, device: str) -> None:
    """What is approximated depends on the slots of each device: two have the tokens of two."""
    make, options = INEXACT[name]
    options = {**FEW, **options}
    tokens, stats = generated(make(), device, **options)
    assert tokens == expected(make(), options, "cpu" if device == ONE else "fake,fake")
    assert stats.approximated["inexact_share"] > 0


@pytest.mark.parametrize("device", [ONE, TWO])
def test_biased_routers_have_the_tokens_of_a_cpu(device: str) -> None:
    """What is chosen depends on the slots of each device: two have the tokens of two."""
    folder, options = tiny(num_experts_per_tok=4), {**FEW, "cache": "50%", "cache_bias": 0.5}
    tokens, _ = generated(folder, device, **options)
    assert tokens == expected(folder, options, "cpu" if device == ONE else "fake,fake")
    assert tokens != expected(folder, {**FEW, "cache": "50%"})


@pytest.mark.parametrize("device", [ONE, TWO])
@pytest.mark.parametrize("split", ["0.5", "0.25,1"])
def test_segments_have_the_tokens_of_a_cpu(split: str, device: str) -> None:
    options = {**FEW, "cache": "50%", "split": split, "host_memory": "8GiB"}
    options |= {"scope": "per-layer"} if "," in split else {}
    tokens, stats = generated(packed(), device, **options)
    assert tokens == expected(source(), {"cache": "100%"})
    assert stats.split is not None


@cache
def blocks_in_segments() -> Path:
    file = gguf_models.write(Path(KEEP.name) / "wide.gguf", "qwen3_moe")
    pack(str(file), folder := Path(KEEP.name) / "blocks", "same", segments=4)
    return folder


@pytest.mark.parametrize("split", [None, "0.5", "0.25,0.5,1"])
def test_fields_of_segments_are_separated(split: str | None, monkeypatch: Any) -> None:
    """Blocks of Q8_0 lie as for Triton's kernels; the eager kernel reads them there."""
    monkeypatch.setattr(memory_slots, "GPU_KERNEL", "eager")
    separated, separate = set[str](), block_fields.separate

    def record(encoding: str, data: Any, first: int, matrix: Any) -> None:
        separated.add(encoding)
        separate(encoding, data, first, matrix)

    monkeypatch.setattr(block_fields, "separate", record)
    options = {**FEW, "cache": "50%", "host_memory": "8GiB"} | ({"split": split} if split else {})
    options |= {"scope": "per-layer"} if split and "," in split else {}
    tokens, _ = generated(blocks_in_segments(), ONE, **options)
    assert tokens == expected(blocks_in_segments(), {"cache": "100%"})
    assert separated == {"q8_0"}


@pytest.mark.parametrize("split", ["0.5", "0.25,1"])
def test_segments_of_whole_layers_have_the_tokens_of_a_cpu(split: str) -> None:
    options = {**FEW, "cache": "50%", "split": split, "host_memory": "8GiB"}
    options |= {"scope": "per-layer"} if "," in split else {}
    tokens, stats = generated(packed(), TWO, **options, device_placement="layers")
    assert tokens == expected(source(), {"cache": "100%"})
    assert stats.split is not None


@needs_option("miss_precision")
def test_copies_of_whole_layers_have_the_tokens_of_a_cpu() -> None:
    options = {**FEW, "miss_precision": "int4", "low_below": 0.8, "device_placement": "layers"}
    folder = with_copies("int8", "int4")
    tokens, stats = generated(folder, TWO, **options)
    assert tokens == expected(folder, options, "fake,fake")
    assert stats.approximated["low"] > 0


@pytest.mark.parametrize("device", [ONE, TWO])
def test_copies_are_joined_on_their_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for experts in host memory, where they would be whole."""
    monkeypatch.setattr(load_budget, "host_slots", lambda *args: (2 << 30, 0))
    folder = with_copies("int8", "int4")
    options = {"cache": "90%", "prefetch": "off", "miss_precision": "int4", "low_below": 0.9}
    tokens, stats = generated(folder, device, **options)
    assert tokens == expected(folder, options, "cpu" if device == ONE else "fake,fake")
    assert stats.approximated["joined"] > 0


@needs_option("expert_order")
@pytest.mark.parametrize("device", [ONE, TWO])
def test_other_orders_of_experts_have_the_tokens_of_a_cpu(device: str) -> None:
    options = {**FEW, "expert_order": "cached", "host_memory": "8GiB"}
    tokens, _ = generated(tiny(), device, **options)
    assert tokens == expected(tiny(), {"cache": "100%"})


@needs_option("co_compute")
def test_the_start_up_line_names_co_computation() -> None:
    options: dict[str, Any] = {"host_memory": "8GiB", "co_compute": "auto", "kernels": "eager"}
    model, _ = greenroom.load(str(tiny()), device=ONE, **FEW, **options)
    try:
        line = startup_line("tiny", model, LoadConfig(device=ONE, **FEW, **options))
        assert "misses on both processors, which may change last bits" in line
    finally:
        model.greenroom.detach()


@pytest.mark.parametrize("kv", ["dynamic", pytest.param("int8", marks=pytest.mark.slow)])
def test_keys_and_values_take_slots_and_give_them_back(
    kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "SEGMENT_BYTES", 1)  # slots are freed one by one
    sizes = {"hidden_size": 64, "moe_intermediate_size": 320}
    folder, found = tiny(max_position_embeddings=1100, **sizes), []
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 250, (1, 1024), generator=generator)
    for device in (ONE, TWO, "cpu"):
        model, _ = greenroom.load(
            str(folder), "1GiB", kernels="eager", device=device, kv=kv, context=1032,
            prefetch="off", prompt_block=512,
        )  # fmt: skip
        try:
            budget = model.greenroom.slot_budget
            assert budget is not None
            if device != "cpu":  # a full context leaves two slots on each
                model.greenroom.use_slot_budget(budget.for_slots(2 * budget.devices))
            model.greenroom.reset_stats()
            before = model.greenroom.capacity
            found.append(model.generate(ids.to(model.device), **TOKENS)[0, 1024:].tolist())
            least = model.greenroom.stats().capacity_least
            assert device == "cpu" or 2 * budget.devices <= least < before
            model.generate(ids[:, :7].to(model.device), **TOKENS)
            assert device == "cpu" or least < model.greenroom.capacity
        finally:
            model.greenroom.detach()
    assert found[0] == found[1] == found[2]


def test_gpus_come_and_go_and_the_tokens_stay() -> None:
    model, _ = greenroom.load(
        str(tiny()), kernels="eager", device=TWO, spare_devices=1, host_memory="8GiB", **FEW
    )
    try:
        ids = torch.randint(3, 250, (1, 7), generator=torch.Generator().manual_seed(7))
        for device in (ONE, TWO, ONE):
            model.greenroom.use_devices(device)
            pools = model.greenroom.driver.slots.pools
            assert [pool.capacity > 0 for pool in pools] == [True, device == TWO]
            answer = model.generate(ids.to(model.device), **TOKENS)[0, 7:].tolist()
            assert answer == expected(tiny(), {"cache": "100%"})[:8]
    finally:
        model.greenroom.detach()
