"""Split experts between host memory and a device: the same bits.

The device is `fake`, whose slots hold NaN until bytes arrive, or the CPU in a GPU's place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import greenroom
from greenroom.core.config.scheduler import NO_OPTIONS, with_options
from greenroom.core.transfers.tiers import host_slot_groups
from greenroom.errors import UsageError
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.memory import devices as places
from greenroom.hf.memory.budget import chunks_of, host_slots
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.memory.slots import pieces_of
from greenroom.hf.memory.split import split_experts
from greenroom.hf.model.reference import load_reference_model
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.host import HostMemory
from greenroom.runtime.cuda.slots import DeviceSlots
from greenroom.runtime.memory.system import available_bytes, rss_bytes
from tests.hf.conftest import one_line
from tests.hf.memory.test_split import ids, logits, packed, source
from tests.options import needs_option

pytestmark = pytest.mark.usefixtures("no_threads_left")
FAKE: dict[str, Any] = {"fake": True, "capacity": 9}


def host_of(folder, shares: Any, **parts: Any):
    """Logits as `logits` gives them, and the scheduler's host tier."""
    output, scheduler = logits(folder, shares, **parts)
    return output, scheduler.transfers.host, scheduler.counts


@pytest.mark.parametrize("cached", [1, 5, 16])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_bits_are_those_of_unsplit_experts(name, cached):
    want, _ = logits(source(name), capacity=64)
    for shares in (None, 0.25, 0.6):
        output, host, counts = host_of(packed(name=name), shares, host_capacity=cached, **FAKE)
        assert torch.equal(output, want), shares
        assert host.requests > host.hits
        assert counts.misses > 0
        assert (counts.bottoms > 0) == (shares is not None)
        assert not host.leases


@pytest.mark.parametrize(
    "parts",
    [
        {"scope": "per-layer"},
        {"kernels": "eager"},
        {"prefetch": "next-gate", "guard": False},
        {"policy": "lcp", "prefetch": "markov", "guard": False, "host_policy": "lcp"},
    ],
    ids=str,
)
def test_scopes_kernels_and_predictors_do_not_change_the_output(parts):
    want, _ = logits(source(), capacity=64, kernels=parts.get("kernels", "auto"))
    hits = 0  # how many of one run are hits depends on when reads end
    for shares in (0.5, (0.25, 0.75), (1.0, 0.5)):
        every = {**FAKE, "capacity": 12, "host_capacity": 6, **parts}
        if isinstance(shares, tuple) and "scope" not in parts:
            every["scope"] = (1.0, 1.0)
        output, host, counts = host_of(packed(), shares, **every)
        assert torch.equal(output, want), shares
        assert counts.bottoms > 0
        hits += host.hits
    assert hits > 0


@pytest.mark.parametrize("shares", [None, 0.5, (0.25, 1.0)])
def test_the_eager_kernel_computes_segments_in_a_device_s_memory(shares, monkeypatch):
    monkeypatch.setattr(places, "engine_for", lambda setup, number: Engine())
    want, _ = logits(source(), capacity=64, kernels="eager")
    parts = {"cuda": True, "kernels": "eager", "capacity": 9, "scope": "per-layer"}
    for cached in (0, 6, 16):
        output, host, counts = host_of(packed(), shares, host_capacity=cached, **parts)
        assert torch.equal(output, want)
        assert counts.misses > 0
        assert (host is None) == (cached == 0)


def test_a_resize_changes_the_device_s_slots_of_every_size(monkeypatch):
    monkeypatch.setattr(places, "engine_for", lambda setup, number: Engine())
    want, _ = logits(source(), capacity=64, kernels="eager")
    skeleton = ModelSkeleton.of(packed())
    catalog, split = split_experts(skeleton.catalog, (0.25, 0.75), 2)
    model = skeleton.load()
    model.greenroom = Greenroom(
        model,
        ModelSetup(
            catalog, capacity=8, split=split, scope="per-layer", cuda=True, kernels="eager",
            host_capacity=8,
        ),
    )  # fmt: skip
    try:
        for size in ("60%", "40%", "80%"):
            model.greenroom.resize(size)
            out = model.generate(
                ids(1, 7), max_new_tokens=4, do_sample=False, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
            assert torch.equal(torch.cat(out.logits), want)
    finally:
        model.greenroom.detach()


@pytest.mark.parametrize("shares", [0.5, (0.25, 1.0)])
def test_host_memory_has_room_for_what_it_says(shares):
    """As many experts with both segments as fit, in slots of each size."""
    skeleton = ModelSkeleton.of(packed())
    catalog, split = split_experts(skeleton.catalog, shares, 2)
    pieces = pieces_of(ModelSetup(catalog, 8, split=split, host_capacity=4))
    chunks = chunks_of(catalog, pieces)
    assert [bool(each) for each in chunks] == (pieces.nbytes > 0).tolist()

    def nbytes(capacity: int) -> int:
        groups = host_slot_groups(pieces, capacity)
        memory = HostMemory(Engine(), chunks, 4, 0, groups=groups)
        memory.close()
        return memory.nbytes

    sizes = [nbytes(n) for n in range(2, 17)]
    assert sizes == sorted({*sizes})
    large = str(available_bytes() + rss_bytes())
    assert host_slots(large, catalog, 4, pieces=pieces)[1] == catalog.experts


@needs_option("co_compute")
def test_what_excludes_segments_is_refused():
    """And what excludes nested copies, which are joined on the device."""
    with_copies = pytest.importorskip("tests.hf.memory.test_precision").with_copies
    both = with_options(NO_OPTIONS, co_compute="auto")
    for folder, message in (
        (packed(), "in segments, which excludes --co-compute auto"),
        (with_copies("int8", "int4"), "in the GPU's slots, not in host memory: leave out --co"),
    ):
        parts = {"fake": True, "host_capacity": 4, "config": both}
        with pytest.raises(UsageError, match=message) as error:
            pieces_of(ModelSetup(ModelSkeleton.of(folder).catalog, capacity=4, **parts))
        one_line(error)


def test_a_run_with_both_tiers():
    model, _ = greenroom.load(
        str(packed()), cache="50%", split="0.5", device="fake", host_memory="80%", prefetch="off"
    )
    try:
        stats = model.greenroom.stats()
        assert stats.host["capacity"] == 16
        assert stats.split is not None
    finally:
        model.greenroom.detach()


class Marking(Engine):
    """A device whose marks are counted, from 1."""

    def __init__(self) -> None:
        self.count = 0

    def mark(self) -> int:
        self.count += 1
        return self.count


@pytest.mark.parametrize("shares", [None, 0.5])
def test_no_slot_is_overwritten_before_it_was_last_read(shares, monkeypatch):
    """The eager kernel reads a top again with its bottom: the top's mark is behind that too."""
    engine, last_read = Marking(), {}
    tensor = DeviceSlots.tensor

    def seen(slots: DeviceSlots, slot: int, spec: Any) -> torch.Tensor:
        last_read[id(slots), slot] = slots, engine.count
        return tensor(slots, slot, spec)

    monkeypatch.setattr(places, "engine_for", lambda setup, number: engine)
    monkeypatch.setattr(DeviceSlots, "tensor", seen)
    detach = Greenroom.detach
    checked = []

    def check(self: Greenroom) -> None:
        for (_, slot), (slots, count) in last_read.items():
            checked.append(slots._marks[slot] > count)
        detach(self)

    monkeypatch.setattr(Greenroom, "detach", check)
    logits(packed(), shares, capacity=9, cuda=True, kernels="eager", host_capacity=6)
    assert len(checked) > 8
    assert all(checked)


@pytest.mark.interpreted
@pytest.mark.parametrize("shares", [None, 0.5])
def test_triton_computes_segments_from_two_pools(shares, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(places, "engine_for", lambda setup, number: Engine())
    folder, batch = packed(), ids(1, 2)
    skeleton = ModelSkeleton.of(folder)
    catalog, split = skeleton.catalog, None
    if shares is not None:
        catalog, split = split_experts(catalog, shares, 2)
    model = skeleton.load()
    parts = {"cuda": True, "kernels": "triton", "capacity": 9, "host_capacity": 4}
    model.greenroom = Greenroom(model, ModelSetup(catalog, split=split, **parts))
    try:
        with torch.inference_mode():
            got = model(batch).logits
            assert torch.equal(model(batch).logits, got)  # from host memory, and from the cache
        assert model.greenroom.stats().host["requests"] > 0
    finally:
        model.greenroom.detach()
    theirs = load_reference_model(ModelSkeleton.of(source()))(batch).logits
    assert (got.float() - theirs.float()).abs().max() < 0.1 * theirs.abs().max()
