"""Reuse of prompt prefixes, and the memory that KV caches and experts share."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from greenroom.config import LoadConfig, ServeConfig
from greenroom.core.cache.pressure import CALM_S
from greenroom.errors import (
    BudgetError,
    UsageError,
)
from greenroom.hf.kv.sizes import kv_bytes
from greenroom.hf.memory import pressure
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.server.engine.journal import Journal, PrefixReuse
from greenroom.server.engine.kv_memory import kv_limit
from greenroom.server.engine.requests import Request, Sampling
from greenroom.server.engine.start import start
from greenroom.server.http.metrics import engine_metrics
from tests.hf.memory.sensor import PLENTY, SHORT, FakeSensor
from tests.server.rig import PATIENCE, AnswerRecorder, draw, greedy


def test_the_expert_cache_is_resized_while_answers_run(served: Any, model: Any) -> None:
    s = served(capacity=8)
    recorders = [s.ask(draw(6, seed), 60) for seed in range(2)]
    for size, slots in (("100%", 16), ("25%", 4), ("50%", 8)):
        assert s.engine.resize(size) == slots
        assert s.engine.stats()["memory"]["slots"] == slots
    with pytest.raises(UsageError):
        s.engine.resize("many")
    for seed, each in enumerate(recorders):
        assert each.end().reason == "length"
        assert each.ids == greedy(model, draw(6, seed), 60)


def test_a_second_turn_computes_only_new_tokens(served: Any, model: Any) -> None:
    s = served(journal=Journal())
    prompt = draw(60)
    first = s.ask(prompt, 10)
    first.end()
    turn = [*prompt, *first.ids, *draw(7, 1)]
    second = s.ask(turn, 6)
    assert second.end().reused_tokens == 69  # all but the answer's last token, and what is new
    assert second.ids == greedy(model, turn, 6)
    branch = [*prompt[:40], *draw(9, 2)]
    third = s.ask(branch, 6)
    assert third.end().reused_tokens == 40
    assert third.ids == greedy(model, branch, 6)
    assert s.ask(turn, 6).end().reused_tokens == len(turn) - 1
    assert PrefixReuse(1, 0, 69) in s.engine.journal.events
    assert s.engine.stats()["tokens"]["reused"] == 69 + 40 + len(turn) - 1


def test_a_repeated_prompt_is_computed_once(served: Any, model: Any) -> None:
    s = served()
    prompt = draw(150)
    recorders = [s.ask(prompt, 5) for _ in range(4)]
    reused = [each.end().reused_tokens for each in recorders]
    assert sorted(reused) == [0, 149, 149, 149]
    for each in recorders:
        assert each.ids == greedy(model, prompt, 5)


def test_prefix_reuse_can_be_switched_off(served: Any) -> None:
    s = served(no_prefix_reuse=True)
    for _ in range(2):
        assert s.ask(draw(60), 3).end().reused_tokens == 0
    assert s.engine.stats()["prefixes"]["entries"] == 0


def test_keys_and_values_stay_within_kv_memory(served: Any) -> None:
    s = served(context=100, kv_memory="400KiB", max_batch=8)
    limit = 400 << 10
    samples = []
    recorders = [s.ask(draw(60, seed), 20) for seed in range(8)]
    while any(each.finished is None for each in recorders):
        stats = s.engine.stats()
        samples.append((stats["kv"]["reserved_bytes"] + stats["prefixes"]["bytes"],
                     stats["queue"]["running"]))  # fmt: skip
        time.sleep(0.02)
    assert all(each.end().reason == "length" for each in recorders)
    assert max(nbytes for nbytes, _ in samples) <= limit
    assert max(count for _, count in samples) < 8  # not all had room at once
    assert s.engine.stats()["prefixes"]["bytes"] <= limit // 2


def test_expert_slots_shrink_for_keys_and_values_and_grow_back(
    served: Any, folder: Any, model: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("greenroom.hf.memory.slot_budget.BLOCK", 32)
    one = kv_bytes(ModelSkeleton.of(folder).model, block=512, room=600).total_bytes(600)
    s = served(capacity=16, context=600, slots_at_full_context=4, max_batch=3, prefill_chunk=64,
               kv_memory=one, prefix_share="100%")  # fmt: skip
    system = draw(100)
    recorders, least = [], 16
    for seed in range(3):
        recorders.append(s.ask([*system, *draw(20, seed)], 40))
    while any(each.finished is None for each in recorders):
        memory, kv = s.engine.stats()["memory"], s.engine.stats()["kv"]
        least = min(least, memory["slots"])
        assert (
            kv["reserved_bytes"]
            <= kv["limit_bytes"]
            <= s.engine.greenroom.slot_budget.max_kv_bytes()
        )
        time.sleep(0.02)
    assert least < 12
    for seed, each in enumerate(recorders):
        assert each.end().reason == "length"
        assert each.ids == greedy(model, [*system, *draw(20, seed)], 40)
    assert sum(each.end().reused_tokens >= 100 for each in recorders) == 2
    s.engine.admission.prefixes.shrink(0)
    s.ask(draw(4), 2).end()
    assert s.engine.stats()["memory"]["slots"] > least


@pytest.mark.parametrize(
    ("kv_memory", "most", "message"),
    [
        (
            "1KiB",
            None,
            "is too small for one context of 100 tokens, which takes 10 KiB: use --kv-memory",
        ),
        ("10%", None, "--kv-memory 10% is a share of --memory: set --memory too"),
        ("1MiB", 50 << 10, "--memory 1 MiB leaves only 50 KiB for keys and values"),
    ],
)
def test_an_impossible_kv_memory_is_an_error(kv_memory: str, most: Any, message: str) -> None:
    with pytest.raises(BudgetError) as caught:
        kv_limit(attached_cache(most), ServeConfig(kv_memory=kv_memory))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def attached_cache(most: int | None) -> Any:
    """A fake expert cache: a context takes 10 KiB; the budget, if any, is 1 MiB."""
    return SimpleNamespace(
        setup=SimpleNamespace(
            context=100,
            budget_bytes=None if most is None else 1 << 20,
            keys_values=SimpleNamespace(total_bytes=lambda tokens: 10 << 10),
        ),
        slot_budget=None if most is None else SimpleNamespace(max_kv_bytes=lambda: most),
    )


def test_kv_memory_by_default_and_as_configured() -> None:
    assert kv_limit(attached_cache(None), ServeConfig(max_batch=3)) == 30 << 10
    assert kv_limit(attached_cache(200 << 10), ServeConfig(max_batch=3)) == 30 << 10
    assert kv_limit(attached_cache(80 << 10), ServeConfig(max_batch=3)) == 20 << 10  # a quarter
    assert kv_limit(attached_cache(20 << 10), ServeConfig(max_batch=3)) == 10 << 10  # one, at least
    assert kv_limit(attached_cache(200 << 10), ServeConfig(kv_memory="10%")) == (1 << 20) // 10
    assert kv_limit(attached_cache(None), ServeConfig(kv_memory="64KiB")) == 64 << 10


def test_learned_statistics_warm_the_next_engine(
    folder: Any, monkeypatch: Any, tmp_path: Any
) -> None:
    monkeypatch.setenv("GREENROOM_LEARNED", "on")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    load = LoadConfig(cache="50%", kernels="eager", policy="lru", context=200)
    warm_experts = []
    for _ in range(2):
        engine = start(str(folder), load, ServeConfig())
        until = time.monotonic() + PATIENCE
        while engine.state()[0] == "loading" and time.monotonic() < until:
            time.sleep(0.01)
        warm_experts.append(engine.greenroom.warm_experts)
        recorder = AnswerRecorder()
        engine.submit(Request(tuple(draw(6)), 30, Sampling(0.0), end_ids=()), recorder)
        assert recorder.end().reason == "length"
        assert "experts in slots" in engine.summary
        engine.stop(5)
    assert list((tmp_path / "greenroom" / "learned").glob("*.safetensors"))
    assert warm_experts[0] == 0 < warm_experts[1]


def test_slots_are_given_back_and_filled_again_while_idle(
    folder: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statistics say so; the engine, which waits for requests, reads into slots that return."""
    sensor = FakeSensor()
    monkeypatch.setattr(pressure, "PressureSensor", lambda: sensor)
    config = LoadConfig(memory="60GiB", kernels="eager", context=64, prefetch="markov")
    engine = start(str(folder), config, ServeConfig())
    try:
        until = time.monotonic() + PATIENCE
        while engine.state()[0] == "loading" and time.monotonic() < until:
            time.sleep(0.01)
        full = engine.stats()["memory"]["slots"]
        for _ in range(8):
            sensor.report(SHORT, 0.05)
        stats = engine.stats()
        assert stats["memory"]["slots"] < full
        assert stats["pressure"]["shrinks"] > 0
        names = {family.name: family.samples[0].value for family in engine_metrics(stats)}
        assert names["greenroom_pressure_shrinks"] == stats["pressure"]["shrinks"]
        assert names["greenroom_pressure_released_bytes"] > 0
        recorder = AnswerRecorder()
        engine.submit(Request(ids=draw(5), max_new_tokens=6, sampling=Sampling()), recorder)
        assert recorder.end().reason == "length"
        assert recorder.ids == greedy(model, draw(5), 6)
        for _ in range(40):
            sensor.report(PLENTY, CALM_S)
        assert engine.stats()["memory"]["slots"] == full
        view = engine.greenroom.driver.scheduler.view
        while view.free_slots and time.monotonic() < until:
            time.sleep(0.01)
        assert view.free_slots == 0
    finally:
        engine.stop(0.0)
