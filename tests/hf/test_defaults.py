"""Runs use the settings stored for them, and plans predict these."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from greenroom.config import LoadConfig
from greenroom.core.config.scheduler import option_names
from greenroom.core.machine import machine_name
from greenroom.hf.defaults import apply_defaults
from greenroom.hf.load import attach
from greenroom.hf.load import describe as describing
from greenroom.hf.load.describe import describe
from greenroom.hf.load.load import load_with
from greenroom.hf.load.report import startup_line
from greenroom.hf.memory import budget
from greenroom.plan.history import files
from greenroom.plan.history.records import StoredSetting
from greenroom.plan.quick import QuickPlan
from greenroom.plan.settings import DEFAULT
from greenroom.runtime.measure.bandwidth import host_facts
from tests.hf.memory.test_split import packed
from tests.models import cached_tiny


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(files.SWITCH, "on")
    return tmp_path


@pytest.fixture
def folder() -> str:
    return str(cached_tiny("qwen3_moe", tokenizer=True))


def test_a_run_reports_that_a_quick_plan_chose_lru(
    monkeypatch: pytest.MonkeyPatch, home: Path, no_threads_left: None
):
    lru = QuickPlan(replace(DEFAULT, policy="lru"), 1.0, 1.0)
    monkeypatch.setattr("greenroom.plan.defaults.quick_plan", lambda trace, slots: lru)
    config = LoadConfig(cache="50%", device="cpu", kernels="eager")
    model, _ = load_with(str(cached_tiny("qwen3_moe", tokenizer=True)), config)
    parts = model.greenroom.setup
    model.greenroom.detach()
    assert parts.policy == "lru"
    assert parts.prefetch == "auto"
    assert "misses no more experts than the default in a quick plan" in parts.settings_origin


def test_a_plan_predicts_slots_and_settings(
    folder: str, monkeypatch: pytest.MonkeyPatch, no_threads_left: None
):
    """The first run, which still compiles, and the runs after it."""
    config = LoadConfig(device="cpu", kernels="eager", context=64)
    at_first, loaded_bytes = 400 << 20, 480 << 20  # the process, and with all that is loaded
    for module in (budget, describing):
        monkeypatch.setattr(module, "rss_bytes", lambda: at_first)
    monkeypatch.setattr(attach, "rss_bytes", lambda: loaded_bytes)
    before = describe(folder, config)
    memory = before.memory(10)
    assert before.slots(memory) == 10

    def run() -> tuple[int, int]:
        model, _ = load_with(folder, replace(config, memory=memory))
        greenroom = model.greenroom
        slots = greenroom.capacity, greenroom.slot_budget.full_context_slots
        sizes = tuple(b - a for a, b in pairwise(greenroom.setup.catalog.offsets))
        greenroom.detach()
        assert sizes == before.experts_per_layer
        return slots

    first = run()
    expected = at_first + describing.COMPILERS - (loaded_bytes - before.dense_bytes)
    assert first[0] == min(
        before.experts, (memory - before.fixed_bytes + expected) // before.slot_bytes
    )
    records = files.load_records(before.fingerprint, machine_name(host_facts()))
    assert records.process == loaded_bytes - before.dense_bytes
    after = describe(folder, config)
    assert (after.slots(memory), after.slots_when_full(memory)) == first == run()


def store_setting(
    fingerprint: str, capacity: int, machine: str | None = None, **options: str
) -> None:
    setting = StoredSetting(capacity, options, "tune", 0.08, 0.1, "2026-01-02")
    name = machine or machine_name(host_facts())
    files.update_records(fingerprint, name, lambda records: records.with_setting(setting))


def test_a_run_uses_measured_settings_and_reports_them(folder: str, no_threads_left: None):
    config = LoadConfig(cache="50%", device="cpu", kernels="eager")
    model, _ = load_with(folder, config, remember=True)
    digest = model.greenroom.setup.fingerprint
    assert "settings" not in startup_line(folder, model, config, verbose=True)
    model.greenroom.detach()
    store_setting(digest, 8, policy="lcp", scope="per-layer", prefetch="off")
    model, _ = load_with(folder, config, remember=True)
    line = startup_line(folder, model, config, verbose=True)
    model.greenroom.detach()
    assert "settings measured by tune on 2026-01-02, 20% less time a token than LRU" in line
    assert "--policy lcp" in line
    assert "--prefetch off" in line
    assert "--scope per-layer" in line


def test_a_run_uses_a_measured_split(no_threads_left: None):
    folder = str(packed())
    config = LoadConfig(cache="60%", device="cpu", kernels="eager")
    model, _ = load_with(folder, config, remember=True)
    setup, capacity = model.greenroom.setup, model.greenroom.capacity
    model.greenroom.detach()
    assert setup.split is None
    store_setting(
        setup.fingerprint, capacity, policy="lru", scope="per-layer", prefetch="off", split="0.5"
    )
    model, _ = load_with(folder, config, remember=True)
    line, parts = startup_line(folder, model, config, verbose=True), model.greenroom.setup
    model.greenroom.detach()
    assert parts.split is not None
    assert parts.split.tops[0] < parts.split.unsplit_bytes
    assert "settings measured by tune" in line
    flag = line.partition("--split ")[2].split()[0]
    assert [float(share) for share in flag.split(",")] == pytest.approx([0.5, 0.5], abs=0.15)
    if "skip_below" in option_names():
        skipping = replace(config, skip_below=0.1)
        model, _ = load_with(folder, skipping, remember=True)
        assert model.greenroom.setup.split is None  # misses of split experts are not judged
        model.greenroom.detach()


@pytest.mark.parametrize(
    ("config", "capacity", "machine"),
    [
        (LoadConfig(cache="50%", device="cpu", policy="fifo"), 8, None),  # the user said it
        (LoadConfig(cache="50%", device="cpu", prefetch="off"), 8, None),
        (LoadConfig(cache="50%", device="cpu"), 12, None),  # of another size
        (LoadConfig(cache="50%", device="cpu"), 8, "abacus"),  # of another machine
        (LoadConfig(cache="100%", device="cpu"), 16, None),  # nothing to choose
    ],
)
def test_stored_settings_yield_to_the_user_s_options(
    folder: str, config: LoadConfig, capacity: int, machine: str | None, no_threads_left: None
):
    model, _ = load_with(folder, LoadConfig(cache="50%", device="cpu"), remember=False)
    parts = model.greenroom.setup
    model.greenroom.detach()
    store_setting(parts.fingerprint, capacity, machine, policy="lcp", prefetch="off")
    model, _ = load_with(folder, config, remember=True)
    assert model.greenroom.setup.settings_origin == ""
    assert model.greenroom.driver.scheduler.placement.cache.policy.name != "lcp"
    model.greenroom.detach()


def test_no_stored_setting_is_used_without_remember(folder: str, no_threads_left: None):
    config = LoadConfig(cache="50%", device="cpu")
    model, _ = load_with(folder, config, remember=False)
    parts = model.greenroom.setup
    model.greenroom.detach()
    store_setting(parts.fingerprint, 8, policy="lcp")
    assert apply_defaults(parts, config, 8, 2) is parts
