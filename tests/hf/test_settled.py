"""What a run takes that is told nothing but a size, and that a plan says the same beforehand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from greenroom.config import LoadConfig
from greenroom.core.machine import name_of
from greenroom.hf import budget, learned, load, recent, settled
from greenroom.hf.describe import describe
from greenroom.hf.learned import Learned
from greenroom.hf.load import load_with
from greenroom.plan import kept
from greenroom.plan.kept import Kept, Known
from greenroom.plan.quick import Quick
from greenroom.plan.settings import DEFAULT
from greenroom.runtime.measure import host
from tests.models import cached_tiny
from tests.sim import small

SIZES = (8, 8)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(kept.SWITCH, "on")
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of what each quick plan went by; LRU wins all of them."""
    tokens: list[int] = []

    def quick(trace, room: int) -> Quick:
        tokens.append(trace.tokens)
        return Quick(replace(DEFAULT, policy="lru"), 1.0, 1.0)

    monkeypatch.setattr(settled, "quick", quick)
    return tokens


def leave(requests: int) -> None:
    """Routing of earlier runs: 200 decoded tokens a request."""
    trace = small.trace([[1] * 200] * requests)
    state = {
        "experts": trace.experts,
        "lengths": np.diff(trace.pass_starts),
        "requests": np.repeat(np.arange(requests), 200),
        "prompts": np.zeros(200 * requests, np.uint8),
    }
    learned.save("abc", Learned(np.empty(0, np.int64), np.zeros(16), {recent.NAME: state}))


def taken(room: int = 8, device: str = "cpu") -> Kept | None:
    return settled.taken("abc", "here", SIZES, 2, room, device)


def test_a_quick_plan_is_made_once_and_again_where_more_is_known(asked: list[int]):
    first = taken()
    assert first is not None
    assert (first.by, first.options["policy"], first.options["prefetch"]) == (
        "quick",
        "lru",
        "auto",
    )
    assert taken() == first
    assert len(asked) == 1  # a stand-in's
    leave(1)
    assert taken() == first  # one request is not enough
    leave(2)
    assert taken().tokens == 400
    leave(3)
    assert taken().tokens == 400
    leave(4)
    assert taken().tokens == 800
    assert asked[1:] == [400, 800]


def test_each_size_and_device_has_its_own(asked: list[int]):
    assert taken(8) != taken(12) != taken(12, "cuda")
    assert len(asked) == 3


def test_what_was_measured_or_planned_goes_first(asked: list[int]):
    sure = Kept(8, {"policy": "lcp"}, "plan", 0.08, 0.1, "2026-01-02")
    kept.save("abc", "here", Known().with_setting(sure))
    assert taken() == sure
    assert asked == []


def test_nothing_where_nothing_is_kept_or_nothing_fits(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
):
    assert taken(1) is None
    monkeypatch.setenv(kept.SWITCH, "off")
    assert taken() is None
    assert asked == []


def test_a_run_says_that_it_took_lru(asked: list[int], no_threads_left: None):
    config = LoadConfig(cache="50%", device="cpu", kernels="eager")
    model, _ = load_with(str(cached_tiny("qwen3_moe", tokenizer=True)), config)
    parts = model.greenroom.parts
    model.greenroom.detach()
    assert parts.policy == "lru"
    assert parts.prefetch == "auto"
    assert "misses no more experts in a quick plan" in parts.chosen


def test_a_plan_foretells_slots_and_settings(
    monkeypatch: pytest.MonkeyPatch, no_threads_left: None
):
    """Of the first run, as long as compiling takes what is set aside; and of those after it."""
    folder = str(cached_tiny("qwen3_moe", tokenizer=True))
    config = LoadConfig(device="cpu", kernels="eager", context=64)
    at_first, whole = 400 << 20, 480 << 20  # the process, and with all that is loaded
    monkeypatch.setattr(budget, "rss_bytes", lambda: at_first)
    monkeypatch.setattr(load, "rss_bytes", lambda: whole)
    before = describe(folder, config)
    memory = before.memory(10)
    assert before.slots(memory) == 10

    def run() -> tuple[int, int]:
        model, _ = load_with(folder, replace(config, memory=memory))
        made = model.greenroom
        found = made.capacity, made.growth.least
        sizes = tuple(b - a for a, b in pairwise(made.parts.catalog.offsets))
        made.detach()
        assert sizes == before.experts_per_layer
        return found

    first = run()
    expected = at_first + budget.COMPILERS - (whole - before.dense_bytes)
    assert first[0] == min(before.experts, (memory - before.needs + expected) // before.slot_bytes)
    known = kept.load(before.fingerprint, name_of(host()))
    assert known.process == whole - before.dense_bytes
    after = describe(folder, config)
    assert (after.slots(memory), after.slots_when_full(memory)) == first == run()
