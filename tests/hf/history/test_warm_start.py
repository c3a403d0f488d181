"""What earlier runs leave: the cache starts as they ended, and nothing that it holds can harm."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import greenroom
import greenroom.runtime.store.disk
from greenroom.config import LoadConfig
from greenroom.errors import StoreError
from greenroom.hf.history import warm_start
from greenroom.hf.load.load import load_with
from greenroom.plan.history import files
from greenroom.plan.history.files import load_routing, save_routing
from greenroom.plan.history.recent import RecentRouting, recent_trace
from greenroom.plan.history.routing import RoutingHistory
from tests.emulated_gpu import emulated_gpus
from tests.hf.memory.test_split import packed
from tests.models import cached_tiny

PROMPT = torch.tensor([[5, 6, 7, 8]])
EXPERTS = 16  # of the tiny model: two layers of 8


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(files.SWITCH)
    return tmp_path / "cache"


@pytest.fixture
def folder() -> str:
    return str(cached_tiny("qwen3_moe", tokenizer=True))


def answer(folder: str, tokens: int = 24, **options):
    """(tokens, stats, Greenroom, residents at the start) of a run that began as it was left."""
    options = {"cache": "40%", "kernels": "eager", "prefetch": "off", **options}
    model, _ = greenroom.load(folder, **options)
    room = model.greenroom
    stats = room.stats()
    assert (stats.bytes_read, stats.passes, stats.links[0]["bytes"]) == (0, 0, 0)
    assert room.stats().expert_requests == 0
    began = room.driver.scheduler.residents()
    ids = model.generate(PROMPT, max_new_tokens=tokens, do_sample=False, min_new_tokens=tokens)
    stats = room.stats()
    room.detach()
    return ids, stats, room, began


def kept() -> Path | None:
    found = list((files.cache_folder() / "learned").glob("*"))
    assert len(found) <= 1
    return found[0] if found else None


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_run_starts_with_the_experts_that_the_last_run_ended_with(folder, caplog):
    first, cold, before, nothing = answer(folder)
    assert nothing.size == before.warm_experts == 0
    assert kept()
    ended = before.driver.scheduler.residents()
    again, warm, after, began = answer(folder)
    assert after.warm_experts == warm.capacity == 6
    np.testing.assert_array_equal(began, ended)
    assert torch.equal(again, first)
    assert warm.expert_requests == cold.expert_requests
    assert warm.passes == cold.passes
    assert warm.expert_hits > cold.expert_hits
    assert warnings(caplog) == []


def test_reads_between_requests_begin_with_the_experts_that_the_last_run_ended_with(folder):
    ended = set(answer(folder, policy="lru")[2].driver.scheduler.residents().tolist())
    model, _ = greenroom.load(folder, cache="40%", kernels="eager", prefetch="off")
    order = model.greenroom._warm_start.expected_use().tolist()
    model.greenroom.detach()
    assert set(order[:6]) == ended
    assert sorted(order) == list(range(EXPERTS))


@pytest.mark.parametrize(
    ("policy", "scope"),
    [("lru", "shared"), ("lru", "per-layer"), ("arc", "shared"), ("hybrimoe", "shared")],
)
def test_experts_of_a_run_warm_up_other_policies_and_cache_sizes(folder, policy, scope):
    first, *_ = answer(folder)
    for options in ({"cache": "13%"}, {"cache": "100%"}, {"device": "fake", "prefetch": "auto"}):
        again, stats, after, began = answer(folder, 3, policy=policy, scope=scope, **options)
        assert torch.equal(again, first[:, : again.shape[1]])
        assert began.size == after.warm_experts <= stats.capacity
        if scope == "shared" and "cache" not in options:
            assert began.size == stats.capacity


def test_a_predictor_continues_from_its_saved_state(folder, caplog):
    *_, before, _ = answer(folder, prefetch="markov", no_guard=True)
    state = before.predictor.state()
    model, _ = greenroom.load(folder, cache="40%", prefetch="markov", kernels="eager")
    for name, array in model.greenroom.predictor.state().items():
        np.testing.assert_array_equal(array, state[name])
    model.greenroom.detach()
    answer(folder, prefetch="token")  # keeps what it has no use for
    found = load_routing(kept().stem)
    assert set(found.states) == {"markov", "token", "recent", "policy next-use"}
    assert warnings(caplog) == []


def test_a_state_that_does_not_fit_is_ignored_with_one_warning(folder, caplog):
    answer(folder, prefetch="markov")
    found = load_routing(kept().stem)
    save_routing(
        kept().stem, RoutingHistory(found.hot, found.popularity, {"markov": {"x": np.ones(1)}})
    )
    answer(folder, 3, prefetch="markov")
    assert len(warnings(caplog)) == 1
    assert warnings(caplog)[0].startswith("predictor markov cannot use its state of the last run")


@pytest.mark.parametrize("policy", ["next-use:short=2", "moe-infinity:capacity=3", "lru"])
def test_a_run_continues_from_what_the_policy_has_learned(folder, policy, caplog):
    first, _, before, _ = answer(folder, policy=policy)
    learned = before.driver.scheduler.view.export_learned()
    assert bool(learned) == (policy != "lru")
    model, _ = greenroom.load(folder, cache="40%", policy=policy, kernels="eager", prefetch="off")
    scheduler = model.greenroom.driver.scheduler
    assert model.greenroom.warm_experts > 0  # these reads taught the policy nothing
    assert scheduler.view.export_learned().keys() == learned.keys()
    for name, array in scheduler.view.export_learned().items():
        np.testing.assert_array_equal(array, learned[name])
    model.greenroom.detach()
    again, *_ = answer(folder, policy=policy.partition(":")[0])  # with other options
    assert torch.equal(again, first)
    assert warnings(caplog) == []


def test_reads_of_a_first_warm_start_teach_a_policy_nothing(folder):
    answer(folder, policy="lru")
    model, _ = greenroom.load(folder, cache="40%", policy="moe-infinity", kernels="eager")
    assert model.greenroom.warm_experts > 0
    scheduler = model.greenroom.driver.scheduler
    learned = scheduler.view.export_learned()
    assert learned["0/prefill"].shape == learned["0/decode"].shape == (0, EXPERTS)
    model.greenroom.detach()


def test_what_a_policy_cannot_use_is_ignored_with_one_warning(folder, caplog):
    first, *_ = answer(folder)
    found = load_routing(kept().stem)
    states = {"policy next-use": {"0/version": np.array(99)}}
    save_routing(kept().stem, RoutingHistory(found.hot, found.popularity, states))
    again, *_ = answer(folder)
    assert torch.equal(again, first)
    assert warnings(caplog) == [
        "policy next-use cannot use what it learned in earlier runs, and learns anew: the stored"
        " arrays of policy next-use have version 99, but must have version 2"
    ]
    assert "0/links" in load_routing(kept().stem).states["policy next-use"]


def test_a_run_of_a_few_tokens_is_not_saved(folder):
    answer(folder, warm_start.LEAST - 1)
    assert kept() is None
    answer(folder, warm_start.LEAST)
    assert kept()


def test_nothing_is_saved_or_read_when_history_is_disabled(folder, monkeypatch):
    config = LoadConfig(cache="40%", kernels="eager")
    model, _ = load_with(folder, config, remember=False)
    model.generate(PROMPT, max_new_tokens=20)
    model.greenroom.detach()
    monkeypatch.setenv(files.SWITCH, "off")
    answer(folder)
    assert kept() is None
    monkeypatch.delenv(files.SWITCH)
    answer(folder)
    model, _ = load_with(folder, config, remember=False)
    assert model.greenroom.warm_experts == 0
    model.greenroom.detach()
    monkeypatch.setenv(files.SWITCH, "off")
    assert answer(folder)[2].warm_experts == 0


def test_a_home_folder_that_cannot_be_written_gives_a_warning(folder, home, caplog):
    home.write_text("not a folder")
    assert answer(folder)[2].warm_experts == 0
    assert len(warnings(caplog)) == 1
    assert "could not save" in warnings(caplog)[0]


def test_old_requests_count_less(folder, monkeypatch):
    *_, before, _ = answer(folder)
    asked = before.driver.request_counts
    key = kept().stem
    np.testing.assert_array_equal(load_routing(key).popularity, asked)
    monkeypatch.setattr(warm_start, "HALF_LIFE", 24.0)  # passes of a run
    *_, after, _ = answer(folder)
    np.testing.assert_array_equal(
        after.driver.request_counts, asked
    )  # none for what warming up read
    np.testing.assert_allclose(load_routing(key).popularity, 1.5 * asked)
    hot, popularity = load_routing(key).hot, load_routing(key).popularity
    assert (np.diff(popularity[hot]) <= 0).all()


def test_the_history_of_another_model_is_ignored(folder):
    answer(folder)
    save_routing(kept().stem, RoutingHistory(np.arange(99), np.ones(99)))
    assert answer(folder)[2].warm_experts == 0
    assert load_routing(kept().stem).popularity.size == EXPERTS


def test_warming_up_from_a_slow_disk_ends_at_its_time_limit(folder, monkeypatch):
    answer(folder, cache="100%")
    monkeypatch.setattr(warm_start, "LIMIT_S", 0.3)
    monkeypatch.setattr(warm_start, "UNTIMED", 20_000)  # some experts of the first layer
    read = greenroom.runtime.store.disk.DiskStore.read

    def slow(*args):
        time.sleep(0.05)
        return read(*args)

    monkeypatch.setattr("greenroom.runtime.store.disk.DiskStore.read", slow)
    begin = time.perf_counter()
    model, _ = greenroom.load(folder, cache="100%", kernels="eager", readers=1)
    took = time.perf_counter() - begin
    warmed = model.greenroom.warm_experts
    assert 1 <= warmed < EXPERTS, took
    layers = model.greenroom.driver.scheduler.residents() // 8
    assert set(layers.tolist()) == {0, 1}
    model.greenroom.detach()


def test_a_read_error_while_warming_up_gives_a_warning(folder, monkeypatch, caplog):
    first, *_ = answer(folder)
    read, calls = greenroom.runtime.store.disk.DiskStore.read, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 2:
            raise StoreError("cannot read shard: Input/output error")
        return read(*args)

    monkeypatch.setattr("greenroom.runtime.store.disk.DiskStore.read", failing)
    again, stats, *_ = answer(folder)
    assert torch.equal(again, first)
    assert stats.capacity == 6
    assert warnings(caplog) == [
        "reading the experts of earlier runs failed, so the first tokens may be slower: cannot"
        " read shard:"
        " Input/output error"
    ]


def test_a_run_saves_its_routing(folder, monkeypatch):
    heard: list[tuple[int, np.ndarray]] = []
    model, _ = greenroom.load(folder, cache="40%", kernels="eager", prefetch="off")
    chosen = RecentRouting.on_routing

    def hear(self: RecentRouting, layer: int, experts: np.ndarray) -> None:
        heard.append((layer, experts.copy()))
        chosen(self, layer, experts)

    monkeypatch.setattr(RecentRouting, "on_routing", hear)
    for prompt in ([[5, 6, 7]], [[9, 8]]):
        model.generate(torch.tensor(prompt), max_new_tokens=12, min_new_tokens=12, do_sample=False)
    digest = model.greenroom.setup.fingerprint
    model.greenroom.detach()
    trace = recent_trace(load_routing(digest), (8, 8))
    assert trace is not None
    assert trace.tokens == 3 + 11 + 2 + 11
    assert np.flatnonzero(trace.pass_prefill).tolist() == [0, 12]
    assert trace.request_starts.tolist() == [0, 14, 27]
    for layer in (0, 1):
        experts = np.concatenate([each for at, each in heard if at == layer])
        np.testing.assert_array_equal(trace.experts[:, layer], experts)


def test_a_gpu_starts_with_the_experts_of_earlier_runs(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(folder)[0]
    emulated_gpus(monkeypatch)
    for began, device in ((False, "cuda:0,cuda:1"), (True, "cuda:0,cuda:1"), (True, "cuda")):
        model, _ = greenroom.load(
            folder, cache="40%", kernels="eager", prefetch="off", device=device,
            host_memory="2GiB",
        )  # fmt: skip
        try:
            assert (model.greenroom.warm_experts > 0) or not began
            ids = model.generate(PROMPT.to(model.device), max_new_tokens=24, do_sample=False,
                                 min_new_tokens=24)  # fmt: skip
            assert torch.equal(ids.cpu(), expected)
        finally:
            model.greenroom.detach()


@pytest.mark.parametrize("scope", ["shared", "per-layer"])
def test_segments_on_several_devices_are_read_again(scope: str) -> None:
    """Slots of all devices count together, where layers share them and where they do not."""
    options = {"device": "fake,fake", "cache": "50%", "split": "0.5", "scope": scope}
    cold = answer(str(packed()), **options)
    warm = answer(str(packed()), **options)
    assert torch.equal(warm[0], cold[0])
    np.testing.assert_array_equal(warm[3], cold[2].driver.scheduler.residents())
