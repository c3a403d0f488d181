from __future__ import annotations

import gc
import threading
import time

import psutil
import pytest
import torch

import greenroom
from greenroom.config import LoadConfig
from greenroom.errors import BudgetError, ClosedError, StoreError, UnknownName, UsageError
from greenroom.hf.memory.slots import slots_for
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.policies import DEFAULT
from tests.models import cached_tiny, reference

PROMPT = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="module")
def folder():
    return str(cached_tiny("qwen3_moe", tokenizer=True))


@pytest.fixture
def loaded(folder):
    models = []

    def make(**options):
        options.setdefault("cache", "25%")
        models.append(greenroom.load(folder, **options)[0])
        return models[-1]

    yield make
    for model in models:
        model.greenroom.detach()


def readers() -> int:
    return sum(t.name.startswith("greenroom") for t in threading.enumerate())


def test_a_loaded_model_is_a_transformers_model_that_generates(folder):
    model, tokenizer = greenroom.load(folder, cache="25%", kernels="eager")
    wanted = reference(cached_tiny("qwen3_moe", tokenizer=True))
    prompt = tokenizer("The green room", return_tensors="pt")
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(**prompt, **options), wanted.generate(**prompt, **options))
    stats = model.greenroom.stats()
    assert stats.capacity == stats["capacity"] == 4
    assert dict(stats)["policy"] == DEFAULT
    assert stats.budget_bytes is None
    with pytest.raises(KeyError):
        stats["colour"]
    model.greenroom.detach()


def test_a_late_import_warning_is_logged_once(loaded, monkeypatch, caplog):
    monkeypatch.setattr("greenroom.environment._late", True)
    for _ in range(2):
        loaded(kernels="eager")
    said = [each for each in caplog.messages if "torch was imported before greenroom" in each]
    assert len(said) == 1


def test_the_default_policy_is_the_cheapest_if_all_experts_fit(loaded):
    assert loaded(cache="100%").greenroom.stats().policy == "lru"
    assert loaded(memory="4GiB", cache=None).greenroom.stats().policy == "lru"
    assert loaded(cache="100%", policy="fifo").greenroom.stats().policy == "fifo"
    assert loaded(cache="90%").greenroom.stats().policy == DEFAULT


def test_statistics_restart_at_zero_after_a_reset(loaded):
    model = loaded()
    model.generate(PROMPT, max_new_tokens=3, do_sample=False)
    assert model.greenroom.stats().passes == 3
    model.greenroom.reset_stats()
    stats = model.greenroom.stats()
    assert (stats.passes, stats.expert_requests, stats.bytes_read, stats.stall_s) == (0, 0, 0, 0)
    assert stats.hit_ratio == 0
    assert stats.capacity == 4


def test_resizing_while_it_generates_changes_no_bit(loaded):
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = loaded(cache="100%").generate(PROMPT, **options)
    model, stop = loaded(cache="100%", device="fake"), threading.Event()

    def resize():
        while not stop.is_set():
            for cache in ("13%", "50%", "100%"):
                model.greenroom.resize(cache)
                time.sleep(0.002)  # else Python takes 5 ms from each of torch's operations

    thread = threading.Thread(target=resize)
    thread.start()
    try:
        assert torch.equal(model.generate(PROMPT, **options), expected)
    finally:
        stop.set()
        thread.join()
    assert model.greenroom.resize("50%") == 8
    with pytest.raises(BudgetError):
        model.greenroom.resize(1)


def test_a_model_that_cannot_be_attached_leaves_nothing_behind(folder, monkeypatch):
    def fail(*_, **__):
        raise UsageError("no")

    before = readers()
    monkeypatch.setattr("greenroom.hf.attach.bindings.accelerate", fail)
    with pytest.raises(UsageError, match="no"):
        greenroom.load(folder, cache="25%", kernels="native")
    assert readers() == before


def test_detaching_ends_threads_and_removes_every_hook(loaded):
    before = readers()
    model = loaded(kernels="native", readers=3)
    hooked = model.greenroom
    assert readers() == before + 3
    hooked.detach()
    hooked.detach()
    assert readers() == before
    assert model.greenroom is hooked
    assert not [m for m in model.modules() if "forward" in vars(m) or "_greenroom" in vars(m)]
    with pytest.raises(ClosedError, match="not attached"):
        model(PROMPT)
    with pytest.raises(ClosedError):
        hooked.resize("50%")


def test_a_freed_model_ends_its_threads(folder):
    before = readers()
    model, _ = greenroom.load(folder, cache="25%")
    assert readers() > before
    del model
    gc.collect()
    assert readers() == before


def test_a_read_error_fails_only_the_current_answer(loaded, monkeypatch):
    model = loaded(cache="13%")
    options = {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(PROMPT, **options)
    store, count = model.greenroom.driver._copier._store, []
    read = store.read

    def failing(chunk, staging):
        count.append(chunk)
        if len(count) == 5:
            raise StoreError("cannot read shard: Input/output error")
        return read(chunk, staging)

    monkeypatch.setattr(store, "read", failing)
    with pytest.raises(StoreError, match="Input/output error"):
        model.generate(PROMPT, **options)
    assert torch.equal(model.generate(PROMPT, **options), expected)


def test_a_budget_becomes_slots(folder, loaded):
    model = loaded(cache=None, memory="2GiB")
    stats = model.greenroom.stats()
    assert stats.budget_bytes == 2 << 30
    assert stats.capacity == stats.experts  # a tiny model fits as a whole
    with pytest.raises(BudgetError, match=r"more than the budget of 100 MiB: .*; give") as caught:
        greenroom.load(folder, memory="100MiB")
    enough = str(caught.value).rsplit("--memory ", 1)[1].split()[0]
    assert loaded(cache=None, memory=enough).greenroom.stats().capacity >= 2


def test_a_relative_budget_is_a_share_of_available_memory(loaded):
    stats = loaded(cache=None, memory="50%").greenroom.stats()
    assert 0 < stats.budget_bytes < psutil.virtual_memory().total


def test_a_run_that_takes_more_than_the_machine_has_warns(loaded, monkeypatch, caplog):
    loaded(cache=None, memory="900GiB")
    assert not caplog.messages  # all experts fit: the rest of the budget is not taken
    monkeypatch.setattr("greenroom.hf.load.budget.available_bytes", lambda: 0)
    monkeypatch.setattr("greenroom.hf.load.budget.rss_bytes", lambda: 1 << 20)
    loaded(cache=None, memory="900GiB")
    (message,) = caplog.messages
    assert "this machine has 1 MiB for it now" in message
    assert "give less, or --memory auto" in message


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"memory": "1GiB", "cache": "10%"}, UsageError, "exclude each other"),
        ({"cache": "1"}, BudgetError, "has no room for an expert"),
        ({"cache": "1%"}, BudgetError, "has no room for an expert"),
        ({"cache": "0%"}, BudgetError, "more than 0"),
        ({"cache": "120%"}, UsageError, "at most 100%"),
        ({"cache": "much"}, UsageError, "8GiB or 500MB"),
        ({"policy": "mru"}, UnknownName, "lru, fifo, lfu"),
        ({"kernels": "numba"}, UnknownName, "are now called 'native'"),
        ({"kernels": "cuda"}, UnknownName, "auto, eager, native"),
        ({"device": "tpu"}, UnknownName, "auto, cpu"),
        ({"scope": "global"}, UnknownName, "shared, per-layer"),
        ({"cache": "7%", "scope": "per-layer"}, BudgetError, "a cache slot for each of 2 layers"),
        ({"context": 0}, UsageError, "--context must be at least 1"),
        ({"readers": 0}, UsageError, "--readers must be at least 1"),
        ({"threads": 0}, UsageError, "--threads must be at least 1"),
        ({"dtype": "int3"}, UnknownName, "bfloat16"),
    ],
)
def test_impossible_options_are_errors_before_anything_is_loaded(folder, options, error, words):
    before = readers()
    with pytest.raises(error, match=words) as caught:
        greenroom.load(folder, **options)
    assert "\n" not in str(caught.value)
    assert readers() == before


def test_an_unknown_option_is_an_error(folder):
    with pytest.raises(TypeError, match="memroy"):
        greenroom.load(folder, memroy="1GiB")


@pytest.mark.parametrize("policy", ["fifo", "lfu"])
@pytest.mark.parametrize("scope", ["shared", "per-layer"])
def test_policies_and_scopes_change_no_token(loaded, policy, scope):
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = loaded(cache="100%").generate(PROMPT, **options)
    got = loaded(policy=policy, scope=scope, readers=1, direct="off").generate(PROMPT, **options)
    assert torch.equal(got, expected)


def test_a_budget_with_a_cache_for_each_layer(loaded):
    model = loaded(cache=None, memory="2GiB", scope="per-layer")
    with pytest.raises(BudgetError, match="each of 2 layers"):
        model.greenroom.resize("7%")
    assert model.greenroom.capacity == 16
    model.generate(PROMPT, max_new_tokens=2)


def test_shares_and_bytes_become_slots():
    catalog = ModelSkeleton.of(cached_tiny("qwen3_moe")).catalog
    assert slots_for("25%", catalog) == 4
    assert slots_for(3 * catalog.slot_bytes + 1, catalog) == 3
    assert slots_for("1TiB", catalog) == catalog.experts == 16


def test_config_defaults_are_valid():
    assert LoadConfig().memory is None
