"""Split experts have the bits of unsplit ones, for every split and cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import greenroom
from greenroom.core.cache.state import group_sizes
from greenroom.core.config.scheduler import SchedulerConfig
from greenroom.core.events import Pinned
from greenroom.errors import BudgetError, DeviceError, StoreError, UnsupportedModel, UsageError
from greenroom.hf import defaults
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.check.verify import verify
from greenroom.hf.checkpoint.resolve import open_checkpoint
from greenroom.hf.history import split_counts
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.memory.split import nearest, split_experts
from greenroom.hf.model.reference import load_reference_model
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.hf.pack.packing import pack
from greenroom.plan import configurator
from greenroom.plan.configurator import TokenLatency
from greenroom.plan.history.routing import RoutingHistory
from tests.hf.check.test_parity import ids
from tests.hf.pack.rig import fill
from tests.models import cached_tiny

KEEP: list[TemporaryDirectory[str]] = []
pytestmark = pytest.mark.usefixtures("no_threads_left")


def source(name: str = "qwen3_moe", inner: int = 320) -> Path:
    sizes = {"hidden_size": 64, "moe_intermediate_size": inner, "intermediate_size": inner}
    return cached_tiny(name, dtype="bfloat16", tokenizer=True, **sizes)


@cache
def packed(kind: str = "same", name: str = "qwen3_moe", inner: int = 320) -> Path:
    KEEP.append(TemporaryDirectory(prefix="split-"))
    folder = Path(KEEP[-1].name) / kind
    pack(str(source(name, inner)), folder, kind, segments=4)
    return folder


def logits(folder: Path, shares: Any = None, batch: torch.Tensor | None = None, **parts: Any):
    """Logits of a prompt and four tokens after it, and the run's statistics."""
    skeleton = ModelSkeleton.of(folder)
    catalog, split = skeleton.catalog, None
    if shares is not None:
        catalog, split = split_experts(catalog, shares, 2)
    model = skeleton.load()
    model.greenroom = Greenroom(model, ModelSetup(catalog, split=split, **parts))
    try:
        options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "output_logits": True}
        out = model.generate(
            ids(1, 7) if batch is None else batch, return_dict_in_generate=True, **options
        )
        return torch.cat(out.logits), model.greenroom.driver.scheduler
    finally:
        model.greenroom.detach()


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("qwen3_moe", "native"), ("gpt_oss", "native"),
        ("qwen3_moe", "eager"), ("gpt_oss", "eager"), ("nemotron_h", "eager"),
    ],
)  # fmt: skip
def test_bits_are_those_of_unsplit_experts(name, kernels):
    want, _ = logits(source(name), capacity=64, kernels=kernels)
    folder = packed(name=name)
    assert torch.equal(logits(folder, capacity=9, kernels=kernels)[0], want)
    for shares in (0.25, 0.6):
        output, s = logits(folder, shares, capacity=9, kernels=kernels)
        assert torch.equal(output, want), shares
        assert s.counts.bottoms > 0
        assert s.counts.misses > 0


@pytest.mark.parametrize(("kind", "inner"), [("int8", 320), ("int4", 320), ("fp8", 512)])
def test_encoded_experts_can_be_split(kind, inner, tmp_path):
    """The blocks of fp8 are of 128 channels, and cut between them alone."""
    folder = packed(kind, inner=inner)
    original = load_reference_model(ModelSkeleton.of(source(inner=inner)))
    pack(str(source(inner=inner)), tmp_path / "whole", kind)
    want, _ = logits(tmp_path / "whole", capacity=64)
    assert torch.equal(logits(folder, capacity=7)[0], want)
    assert torch.equal(logits(folder, 0.5, capacity=7)[0], want)
    fill(original, tmp_path / "whole")
    eager, _ = logits(folder, 0.5, capacity=7, kernels="eager")
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "output_logits": True}
    theirs = original.generate(ids(1, 7), return_dict_in_generate=True, **options)
    assert torch.equal(eager, torch.cat(theirs.logits))


@pytest.mark.parametrize(
    "parts",
    [
        {"scope": "per-layer"},
        {"scope": (3.0, 1.0)},
        {"fake": True},
        {"prefetch": "next-gate", "guard": False},
        {"policy": "lcp", "prefetch": "markov", "guard": False, "fake": True},
    ],
    ids=str,
)
def test_scopes_predictors_and_late_bytes_do_not_change_the_output(parts):
    want, _ = logits(source(), capacity=64)
    for shares in (0.5, (0.25, 0.75), (1.0, 0.5)):
        output, s = logits(packed(), shares, capacity=12, **parts)
        assert torch.equal(output, want), shares
        assert s.counts.bottoms > 0


def test_resizing_keeps_tops_and_bits():
    want, _ = logits(source(), capacity=64)
    skeleton = ModelSkeleton.of(packed())
    catalog, split = split_experts(skeleton.catalog, (0.25, 0.75), 2)
    model = skeleton.load()
    model.greenroom = Greenroom(
        model, ModelSetup(catalog, capacity=8, split=split, scope="per-layer")
    )
    try:
        for size in ("60%", "40%", "80%"):
            model.greenroom.resize(size)
            out = model.generate(
                ids(1, 7), max_new_tokens=4, do_sample=False, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
            assert torch.equal(torch.cat(out.logits), want)
            s = model.greenroom.driver.scheduler
            assert s.placement.cache.capacity == sum(group_sizes(s.pieces, s.capacity, "per-layer"))
        with pytest.raises(BudgetError, match="but --split needs memory for"):
            model.greenroom.resize(catalog.slot_bytes)
    finally:
        model.greenroom.detach()


def test_a_run_reports_its_split(tmp_path):
    file = tmp_path / "budgets.json"
    budgets = {"format": "greenroom-budgets", "version": 1, "slots": [5, 4], "split": [0.3, 0.8]}
    file.write_text(json.dumps(budgets))
    model, _ = greenroom.load(
        str(packed()), cache="60%", split=str(file), scope=str(file), prefetch="off"
    )
    try:
        split = model.greenroom.setup.split
        assert [n / split.unsplit_bytes for n in split.tops] == pytest.approx([0.25, 0.75], abs=0.1)
        stats = model.greenroom.stats()
        assert stats.split == {
            "tops": model.greenroom.driver.scheduler.view.group_sizes(),
            "shares": pytest.approx([0.25, 0.75], abs=0.1),
            "secondary_slots": split.secondary_slots,
            "bottoms": 0,
            "bottom_hits": 0,
        }
    finally:
        model.greenroom.detach()


def test_with_room_for_all_nothing_is_split():
    model, _ = greenroom.load(str(packed()), cache="100%", split="0.5")
    try:
        assert model.greenroom.setup.split is None
    finally:
        model.greenroom.detach()


def test_a_damaged_segment_is_never_computed_with(tmp_path):
    folder = tmp_path / "pack"
    pack(str(source()), folder, "same", segments=4)
    header = json.loads((folder / "greenroom.json").read_text())
    layer = header["layers"][0]
    assert header["version"] == 2
    assert len(layer["crc32"]) == layer["experts"] * len(layer["segments"])
    with open(folder / "experts.greenroom", "r+b") as data:  # in the last segment of every expert
        for expert in range(layer["experts"]):
            data.seek(layer["offset"] + expert * layer["stride"] + layer["bytes"] - 1)
            byte = data.read(1)
            data.seek(-1, 1)
            data.write(bytes([byte[0] ^ 1]))
    with pytest.raises(StoreError, match=r"expert \d+ of .* is damaged .*--segments 4 --repair"):
        logits(folder, 0.5, capacity=9)
    pack(str(source()), folder, "same", segments=4, repair=True)
    open_checkpoint(folder).pack.check()
    assert torch.equal(logits(folder, 0.5, capacity=9)[0], logits(source(), capacity=64)[0])


def test_shares_are_rounded_to_the_nearest_segment():
    layout = ModelSkeleton.of(packed()).catalog.layouts[0]
    ends = [s.offset / layout.nbytes for s in layout.segments[1:]] + [1.0]
    assert [nearest(layout, share) for share in (0.01, ends[1], 0.99)] == [1, 2, 4]
    catalog, split = split_experts(ModelSkeleton.of(packed()).catalog, 1.0, 2)
    assert split is None
    assert catalog.pieces == list(range(catalog.experts))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"split": "0.5"},
            "--split needs experts that are packed in segments: make such a pack with",
        ),
        ({"split": "0"}, "--split must be numbers above 0"),
        ({"split": "1.5"}, "--split must be a share of an expert, at most 1, got 1.5"),
        ({"split": "half"}, "--split must be numbers, one for each layer"),
    ],
)
def test_wrong_split_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        greenroom.load(str(source()), cache="50%", **options)


def test_splits_that_do_not_fit_the_model_are_refused(tmp_path):
    with pytest.raises(UsageError, match="--split has 3 numbers, but the model has 2 MoE layers"):
        greenroom.load(str(packed()), cache="50%", split="0.5,0.5,0.5")
    with pytest.raises(UsageError, match="only in bfloat16: leave out --dtype"):
        greenroom.load(str(packed()), cache="50%", dtype="float32")
    with pytest.raises(BudgetError, match="but --split needs memory for"):
        greenroom.load(str(packed()), cache="7%", split="0.5")
    small = cached_tiny("qwen3_moe", dtype="bfloat16", tokenizer=True, moe_intermediate_size=64)
    with pytest.raises(
        UnsupportedModel, match=r"have 64 intermediate channels: .* only at multiples of 64"
    ):
        pack(str(small), tmp_path / "small", "same", segments=4)
    with pytest.raises(UsageError, match="--segments must be at least 1, got 0"):
        pack(str(source()), tmp_path / "none", "same", segments=0)
    with pytest.raises(UsageError, match="is a pack with segments, which cannot be packed again"):
        pack(str(packed()), tmp_path / "again", "int8")


def test_auto_begins_unsplit_and_follows_recorded_counts(monkeypatch, caplog):
    monkeypatch.setattr(defaults, "TAU", 2)
    catalog = ModelSkeleton.of(packed()).catalog
    cut, split, scope = defaults.auto_split(catalog, None, 8, 2)
    assert cut is catalog
    assert split is None
    assert scope == "per-layer"

    skeleton = ModelSkeleton.of(packed())
    model = skeleton.load()
    parts = ModelSetup(
        cut,
        capacity=8,
        split=split,
        scope=scope,
        counts_split=True,
        prefetch="next-gate",
        guard=False,
    )
    model.greenroom = Greenroom(model, parts)
    try:
        model.generate(ids(1, 7), max_new_tokens=6, min_new_tokens=6, do_sample=False)
        state = model.greenroom._split_counts.state(
            model.greenroom.driver, model.greenroom._head_timer.seconds
        )
    finally:
        model.greenroom.detach()
    assert state["tokens"].tolist() == [5, 5]
    assert state["activated"].tolist() == [10, 10]
    assert state["right"].sum() > 0  # next-gate's guesses were heard
    attention, moe, head, load = state["latency"]
    assert min(attention, moe, head, load) > 0

    none = np.zeros(catalog.experts)
    history = RoutingHistory(np.empty(0, np.int64), none, {split_counts.NAME: state})
    cut, split, scope = defaults.auto_split(catalog, history, 8, 2)
    assert sum(scope) == pytest.approx(8)
    want, _ = logits(source(), capacity=64)
    skeleton = ModelSkeleton.of(packed())
    model = skeleton.load()
    model.greenroom = Greenroom(model, ModelSetup(cut, capacity=10, split=split, scope=scope))
    try:
        out = model.generate(
            ids(1, 7), max_new_tokens=4, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        assert torch.equal(torch.cat(out.logits), want)
    finally:
        model.greenroom.detach()

    other = RoutingHistory(history.hot, none, {split_counts.NAME: {**state, "uses": np.zeros(3)}})
    split_counts.SplitCounts(catalog.offsets, other)
    assert "--split auto ignores the expert counts of earlier runs: the stored" in caplog.text


def test_counts_for_auto_are_loaded_and_stored_like_other_history(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("GREENROOM_LEARNED", raising=False)
    options = {"cache": "60%", "split": "auto", "prefetch": "off"}
    model, _ = greenroom.load(str(packed()), **options)
    try:
        assert model.greenroom.setup.scope == "per-layer"
        model.generate(ids(1, 7), max_new_tokens=20, min_new_tokens=20, do_sample=False)
    finally:
        model.greenroom.detach()
    model, _ = greenroom.load(str(packed()), **options)
    try:
        assert model.greenroom._split_counts.activity.tokens.tolist() == [19, 19]
    finally:
        model.greenroom.detach()


def test_verify_splits_experts_too():
    verdict = verify(str(packed()), "30%", tokens=4)
    assert verdict.identical
    assert sum("experts split at" in check for check, _ in verdict.checks) == 2


@pytest.mark.parametrize("shares", [None, 0.75], ids=str)
def test_slots_are_divided_anew_every_tau_tokens_between_requests(monkeypatch, shares):
    """Layer 0 uses random experts, layer 1 always the same two: layer 0 gets more. Same bits."""
    monkeypatch.setattr(
        split_counts, "latency_of", lambda driver, head: TokenLatency(1e-3, 1e-3, head, 1.0)
    )
    want, _ = logits(source(), capacity=64)
    skeleton = ModelSkeleton.of(packed())
    catalog, split = skeleton.catalog, None
    if shares is not None:
        catalog, split = split_experts(catalog, shares, 2)
    model = skeleton.load()
    config = SchedulerConfig(tau=40, split="auto")
    setup = ModelSetup(catalog, 7, "lcp", "per-layer", split, counts_split=True, config=config)
    model.greenroom = attached = Greenroom(model, setup)
    counts, view = attached._split_counts, attached.driver.scheduler.view
    random = np.random.default_rng(0)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "output_logits": True}

    def answer() -> torch.Tensor:
        out = model.generate(ids(1, 7), return_dict_in_generate=True, **options)
        return torch.cat(out.logits)

    def count(tokens: int) -> None:
        for _ in range(tokens):
            counts.activity.token(0, random.choice(catalog.experts_per_layer[0], 2, replace=False))
            counts.activity.token(1, np.array([0, 1]))

    try:
        equal = view.group_sizes()
        assert torch.equal(answer(), want)
        count(30)  # 33 tokens with those of the answer
        assert torch.equal(answer(), want)
        assert view.group_sizes() == equal
        count(10)
        attached.reconfigure(idle=False)  # a request is computed
        assert view.group_sizes() == equal
        assert torch.equal(answer(), want)
        first, second = view.group_sizes()
        assert first > equal[0]
        assert second < equal[1]
        assert torch.equal(answer(), want)  # less than tau tokens later: as it was
        assert view.group_sizes() == [first, second]
        attached.resize("60%")  # the new division holds for another capacity
        assert view.group_sizes()[0] > view.group_sizes()[1]
        assert torch.equal(answer(), want)
    finally:
        attached.detach()


@pytest.fixture
def unequal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Greenroom]:
    """A model of two layers with 5 slots each, which are to be divided 9 to 1."""
    monkeypatch.setattr(
        split_counts, "latency_of", lambda driver, head: TokenLatency(1e-3, 1e-3, head, 1.0)
    )
    few = [SimpleNamespace(budget=each) for each in (9.0, 1.0)]
    monkeypatch.setattr(configurator, "configure", lambda *args, **options: few)
    skeleton = ModelSkeleton.of(packed())
    model = skeleton.load()
    config = SchedulerConfig(tau=1, split="auto")
    setup = ModelSetup(skeleton.catalog, 10, "lcp", "per-layer", counts_split=True, config=config)
    model.greenroom = attached = Greenroom(model, setup)
    for layer in range(2):
        attached._split_counts.activity.token(layer, np.array([0, 1]))
    yield attached
    attached.detach()


def test_slots_that_pinned_experts_need_are_not_given_away(unequal, caplog):
    unequal.driver.send(Pinned(ModelSkeleton.of(packed()).catalog.offsets[1] + np.arange(2)))
    unequal.reconfigure()
    assert unequal.driver.scheduler.view.group_sizes() == [5, 5]
    assert "--split auto does not divide the slots among layers anew: 2 pinned" in caplog.text


def test_slots_that_cannot_be_divided_anew_for_want_of_memory_stay(unequal, caplog, monkeypatch):
    """For a moment both divisions need memory; a server goes on."""

    def refuse(*_: object) -> None:
        raise DeviceError("the GPU has no room")

    monkeypatch.setattr(unequal.driver.slots, "grow", refuse)
    unequal.reconfigure()
    assert unequal.driver.scheduler.view.group_sizes() == [5, 5]
    assert "does not divide the slots among layers anew: the GPU has no room" in caplog.text


def test_a_resize_while_the_slots_are_divided_anew_stays(unequal, monkeypatch):
    configure = configurator.configure

    def resize_first(*args: Any, **options: Any) -> Any:
        unequal.resize(6 * unequal.setup.catalog.slot_bytes)  # as another thread may
        return configure(*args, **options)

    monkeypatch.setattr(configurator, "configure", resize_first)
    unequal.reconfigure()
    assert unequal.capacity == 6
    assert unequal.driver.scheduler.view.group_sizes() == [5, 1]
