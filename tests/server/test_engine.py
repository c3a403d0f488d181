"""The engine behind the server: several requests at once, limits, faults, and the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from greenroom.config import LoadConfig, ServeConfig
from greenroom.errors import (
    BudgetError,
    ClosedError,
    DeviceError,
    NotAModel,
    StoreError,
    UsageError,
)
from greenroom.hf.build import Draft
from greenroom.hf.kv_bytes import kv_bytes
from greenroom.server.engine import ContinuousEngine
from greenroom.server.journal import Journal, Pass, Reuse
from greenroom.server.kv_memory import kv_limit
from greenroom.server.requests import Busy, Request, Sampling, TooLong
from greenroom.server.start import start
from tests.models import cached_tiny, reference
from tests.server.rig import PATIENCE, Heard, Served, draw, greedy

MIXED = [(5, 9), (40, 3), (1, 12), (17, 6), (90, 4), (1, 10)]  # tokens of prompts and answers


@pytest.fixture(scope="module")
def folder() -> Any:
    return cached_tiny("qwen3_moe", tokenizer=True)


@pytest.fixture(scope="module")
def model(folder: Any) -> Any:
    return reference(folder)


@pytest.fixture
def served(folder: Any, no_threads_left: None) -> Iterator[Any]:
    made: list[Served] = []

    def make(**options: Any) -> Served:
        made.append(Served(folder, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def plain(folder: Any) -> Iterator[Served]:
    made = Served(folder)
    yield made
    made.close()


# ---- answers


def test_several_at_once_get_what_transformers_answers_each_alone(served: Any, model: Any) -> None:
    s = served(prefill_chunk=16, max_batch=4)
    asked = [(draw(prompt, seed), new) for seed, (prompt, new) in enumerate(MIXED)]
    heard = [s.ask(ids, new) for ids, new in asked]
    for each, (ids, new) in zip(heard, asked, strict=True):
        finished = each.end()
        assert each.ids == greedy(model, ids, new)
        assert (finished.reason, finished.new_tokens) == ("length", new)
        assert (finished.prompt_tokens, finished.reused_tokens) == (len(ids), 0)
        assert finished.ttft_s is not None
        assert 0 <= finished.queued_s <= finished.ttft_s <= finished.duration_s
        assert finished.hit_ratio is not None
        assert 0 <= finished.hit_ratio <= 1
    assert s.engine.summary.startswith("up to 4 requests together, with ")
    assert (s.engine.model_type, s.engine.end_ids) == ("qwen3_moe", (1,))
    stats = s.engine.stats()
    assert stats["requests"] == {"length": len(MIXED)}
    assert stats["tokens"]["new"] == sum(new for _, new in MIXED)
    assert stats["passes"]["count"] < sum(new for _, new in MIXED)  # they shared passes
    assert stats["passes"]["apart"] == ""
    assert stats["kv"]["reserved_bytes"] == 0


def test_one_token_of_each_is_one_step_of_the_experts(served: Any) -> None:
    s = served(journal=Journal())
    heard = [s.ask(draw(4, seed), 6) for seed in range(3)]
    for each in heard:
        each.end()
    passes = [event for event in s.engine.journal.events if isinstance(event, Pass)]
    assert max(len(event.shares) for event in passes) == 3
    assert s.engine.stats()["passes"]["count"] == len(passes)


def test_a_long_prompt_is_read_beside_answers_that_go_on(served: Any) -> None:
    s = served(prefill_chunk=16, journal=Journal(), no_prefix_reuse=True)
    answers = s.ask(draw(4), 200)
    assert answers.first.wait(PATIENCE)
    long = s.ask(draw(150, 1), 2)
    long.end()
    answers.cancel()
    shares = [event.shares for event in s.engine.journal.events]
    of_long = [share for each in shares for share in each if share[0] == 1 and share[2] > 1]
    assert max(count for _, _, count in of_long) <= 16
    assert sum(count for _, _, count in of_long) >= 150 - 1
    for each in shares:
        numbers = {number for number, _, _ in each}
        assert numbers != {1} or answers.finished is not None  # never without the answer's token


def test_the_first_of_a_prompt_is_whole_where_nobody_waits(served: Any) -> None:
    s = served(prefill_chunk=16, journal=Journal())
    s.ask(draw(150), 1).end()
    assert s.engine.journal.events[0] == Pass(((0, 0, 150),))


def test_an_end_token_ends_an_answer_and_is_told(plain: Served, model: Any) -> None:
    ids = draw(9, 3)
    wanted = greedy(model, ids, 12)
    heard = plain.ask(ids, 12, ends=(wanted[4],))
    assert heard.end().reason == "stop"
    assert heard.ids == wanted[: wanted.index(wanted[4]) + 1]


def test_the_model_s_own_end_where_none_is_said(served: Any, folder: Any, model: Any) -> None:
    ids = draw(9, 3)
    wanted = greedy(model, ids, 12)
    s = served()
    s.engine.end_ids = (wanted[2],)  # random weights seldom give the real one
    heard = s.ask(ids, 12, ends=None)
    assert heard.end().reason == "stop"
    assert heard.ids == wanted[: wanted.index(wanted[2]) + 1]


def test_sampled_tokens_do_not_depend_on_who_else_is_there(served: Any) -> None:
    sampling = Sampling(temperature=0.9, top_p=0.9, seed=11)
    s = served()
    alone = s.ask(draw(12), 20, sampling=sampling)
    alone.end()
    others = [s.ask(draw(9, seed), 25, sampling=Sampling(1.0, seed=seed)) for seed in range(3)]
    again = s.ask(draw(12), 20, sampling=sampling)
    other = s.ask(draw(12), 20, sampling=Sampling(temperature=0.9, top_p=0.9, seed=12))
    assert again.end().new_tokens == 20
    assert again.ids == alone.ids
    other.end()
    assert other.ids != alone.ids
    for each in others:
        each.end()


def test_a_grammar_is_followed(plain: Served) -> None:
    pytest.importorskip("llguidance")
    heard = plain.ask(draw(5), 40, grammar='start: "abc" /[0-9]{2,4}/ "z"')
    assert heard.end().reason == "stop"
    text = plain.engine.tokenizer.decode(heard.ids, skip_special_tokens=True)
    assert text.startswith("abc")
    assert text.endswith("z")
    assert text[3:-1].isdigit()
    with pytest.raises(UsageError, match=r"^grammar: "):
        plain.ask(draw(5), 4, grammar="start: nothing-that-is-defined")


# ---- what is refused


@pytest.mark.parametrize(
    ("request_", "error", "said"),
    [
        ({"ids": []}, UsageError, "the prompt is empty"),
        ({"ids": [5, 9999]}, UsageError, r"tokens that the model has not \(0 to 319\)"),
        ({"ids": [-1]}, UsageError, "tokens that the model has not"),
        ({"ids": [5], "new": 0}, UsageError, "max_new_tokens must be at least 1, got 0"),
        ({"ids": [5], "timeout_s": 0.0}, UsageError, "timeout_s must be above 0"),
        ({"ids": [5] * 300}, TooLong, "300 tokens and 8 new ones: there is room for 300"),
        ({"ids": [5], "new": 1 << 40}, TooLong, "there is room for 300"),
        ({"ids": [5], "sampling": Sampling(top_p=2.0)}, UsageError, "top_p must be above 0 to 1"),
        ({"ids": [5], "top_logprobs": 1000}, UsageError, "top_logprobs must be from 0 to 100"),
    ],
)
def test_what_cannot_be_answered(plain: Served, request_: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        plain.ask(request_.pop("ids"), request_.pop("new", 8), **request_)
    assert plain.engine.state() == ("ready", 1.0, "")


def test_the_same_request_twice_is_two_answers(plain: Served) -> None:
    both = [plain.ask(draw(6), 5, name="same") for _ in range(2)]
    assert [each.end().reason for each in both] == ["length", "length"]
    assert both[0].ids == both[1].ids


def test_one_more_than_may_wait_is_told_when_to_come_again(served: Any) -> None:
    s = served(max_batch=1, max_queue=2, store={"latency": 0.005}, capacity=2)
    first = s.ask(draw(4), 100)
    assert first.first.wait(PATIENCE)
    waiting = [s.ask(draw(4, seed), 2) for seed in (1, 2)]
    with pytest.raises(Busy, match="2 requests wait already") as busy:
        s.ask(draw(4, 3), 2)
    assert busy.value.retry_after_s >= 1
    assert s.engine.stats()["queue"]["waiting"] == 2
    first.cancel()
    assert first.end().reason == "cancelled"
    assert [each.end().reason for each in waiting] == ["length", "length"]
    s.ask(draw(4, 3), 2).end()


# ---- giving up


def test_a_place_is_free_within_one_token(served: Any) -> None:
    s = served(max_batch=1)
    heard = Heard()
    heard.on_token = lambda token: heard.cancel() if len(heard.tokens) == 3 else None
    s.ask(draw(4), 200, heard=heard)
    next_ = s.ask(draw(5, 1), 2)
    assert heard.end().reason == "cancelled"
    assert len(heard.tokens) == 3
    assert next_.end().reason == "length"
    heard.cancel()  # nothing where it has finished
    assert s.engine.stats()["kv"]["reserved_bytes"] == 0


def test_what_nobody_waits_for_is_not_fetched_any_more(served: Any) -> None:
    s = served(capacity=2, store={"latency": 0.05})
    begun = threading.Event()
    read = s.store.read
    s.store.read = lambda *args: (begun.set(), read(*args))[1]
    heard = s.ask(draw(40), 4)
    assert begun.wait(PATIENCE)
    heard.cancel()
    assert heard.end().reason == "cancelled"
    reads = s.store.reads
    assert reads < 16  # the prompt would take every expert of every layer
    s.store.read = read
    assert s.ask(draw(3, 1), 2).end().reason == "length"


def test_who_waits_in_the_queue_can_leave_it(served: Any) -> None:
    s = served(max_batch=1, store={"latency": 0.005}, capacity=2)
    first, second = s.ask(draw(4), 150), s.ask(draw(4, 1), 5)
    second.cancel()
    finished = second.end()
    assert (finished.reason, finished.ttft_s, finished.new_tokens) == ("cancelled", None, 0)
    assert first.finished is None
    first.cancel()


def test_an_answer_has_its_time(served: Any) -> None:
    s = served(max_batch=1, store={"latency": 0.005}, capacity=2)
    first, second = s.ask(draw(4), 250, timeout_s=0.6), s.ask(draw(4, 1), 5, timeout_s=0.1)
    assert second.end().reason == "timeout"
    assert second.ids == []
    finished = first.end()
    assert finished.reason == "timeout"
    assert 0 < finished.new_tokens < 250
    assert 0.6 <= finished.duration_s < 10


def test_a_listener_that_fails_loses_its_own_answer_alone(served: Any, model: Any) -> None:
    s = served()

    def broken(told: object) -> None:
        raise RuntimeError("it hung up")

    other = s.ask(draw(7), 12)
    s.ask(draw(4, 1), 12, heard=broken)  # type: ignore[arg-type]
    assert other.end().reason == "length"
    assert other.ids == greedy(model, draw(7), 12)
    until = time.monotonic() + PATIENCE
    while s.engine.running and time.monotonic() < until:
        time.sleep(0.01)
    assert s.engine.stats()["requests"] == {"length": 1, "cancelled": 1}


# ---- faults


def test_a_read_that_fails_once_harms_nobody(served: Any, model: Any) -> None:
    failing = {"fails": lambda read: read in (7, 30, 31)}
    s = served(capacity=4, store=failing)
    heard = [s.ask(draw(6, seed), 8) for seed in range(3)]
    for seed, each in enumerate(heard):
        assert each.end().reason == "length"
        assert each.ids == greedy(model, draw(6, seed), 8)
    assert s.engine.stats()["passes"]["faults"] >= 2


def test_a_disk_that_is_gone_ends_those_that_need_it_and_no_other(served: Any) -> None:
    broken = threading.Event()
    s = served(capacity=4, store={"fails": lambda read: broken.is_set()})
    s.ask(draw(6), 3).end()
    broken.set()
    lost = [s.ask(draw(6, seed), 8) for seed in (1, 2)]
    for each in lost:
        finished = each.end()
        assert finished.reason == "error"
        assert isinstance(finished.error, StoreError)
    assert s.engine.state()[0] == "ready"
    broken.clear()
    assert s.ask(draw(6, 3), 3).end().reason == "length"


def test_a_request_that_finds_no_memory_ends_alone(served: Any, monkeypatch: Any) -> None:
    s = served()
    prepare = s.engine.admission.prepare

    def fails(sequence: Any, running: Any) -> None:
        if sequence.request.name == "unlucky":
            raise MemoryError
        prepare(sequence, running)

    monkeypatch.setattr(s.engine.admission, "prepare", fails)
    other, lost = s.ask(draw(6), 9), s.ask(draw(6, 1), 9, name="unlucky")
    finished = lost.end()
    assert finished.reason == "error"
    assert isinstance(finished.error, DeviceError)
    assert other.end().reason == "length"
    assert s.engine.stats()["kv"]["reserved_bytes"] == 0


def test_an_engine_that_breaks_says_so_to_everybody(served: Any, monkeypatch: Any) -> None:
    s = served(max_batch=1)

    def bug(shares: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(s.engine.passes, "run", bug)
    heard = [s.ask(draw(4, seed), 5) for seed in range(2)]
    for each in heard:
        finished = each.end()
        assert finished.reason == "error"
        assert "a bug" in str(finished.error)
    name, _, why = s.engine.state()
    assert (name, why) == ("failed", "a bug")
    with pytest.raises(ClosedError, match="the server is failed: a bug"):
        s.ask(draw(4), 5)


def test_a_model_that_cannot_be_loaded() -> None:
    engine = start("/nowhere/at/all", LoadConfig(), ServeConfig())
    engine._thread.join(PATIENCE)
    name, _, why = engine.state()
    assert name == "failed"
    assert "/nowhere/at/all" in why
    with pytest.raises(ClosedError):
        engine.submit(None, None)  # type: ignore[arg-type]
    assert engine.stats()["state"]["name"] == "failed"
    engine.stop(0)
    assert issubclass(NotAModel, Exception)


def test_while_it_loads_one_is_told_to_come_again() -> None:
    go = threading.Event()

    def load(progress: Any) -> Any:
        progress(0.25, "waiting")
        go.wait(PATIENCE)
        raise NotAModel("there is none")

    engine = ContinuousEngine(load, ServeConfig(), 100)
    until = time.monotonic() + PATIENCE
    while engine.state() != ("loading", 0.25, "waiting") and time.monotonic() < until:
        time.sleep(0.005)
    with pytest.raises(Busy, match="the model is loading"):
        engine.submit(None, None)  # type: ignore[arg-type]
    assert engine.stats()["state"]["progress"] == 0.25
    go.set()
    engine._thread.join(PATIENCE)
    assert engine.state()[0] == "failed"


# ---- the end, sizes and figures


def test_running_answers_get_their_time_and_then_it_is_over(served: Any) -> None:
    s = served(store={"latency": 0.003}, capacity=2)
    short, long = s.ask(draw(4), 3), s.ask(draw(4, 1), 290)
    assert long.first.wait(PATIENCE)
    s.engine.stop(0.3)
    assert short.end().reason == "length"
    assert long.end().reason == "cancelled"
    assert s.engine.state()[0] == "stopping"
    with pytest.raises(ClosedError, match="the server is stopping"):
        s.ask(draw(3), 2)
    assert not hasattr(s.engine.model, "greenroom")  # it was detached
    stats = s.engine.stats()
    assert stats["queue"]["running"] == 0
    assert stats["experts"]["requests"] > 0  # as it was at the end


def test_the_cache_changes_its_size_while_answers_run(served: Any, model: Any) -> None:
    s = served(capacity=8)
    heard = [s.ask(draw(6, seed), 60) for seed in range(2)]
    for size, slots in (("100%", 16), ("25%", 4), ("50%", 8)):
        assert s.engine.resize(size) == slots
        assert s.engine.stats()["memory"]["slots"] == slots
    with pytest.raises(UsageError):
        s.engine.resize("many")
    for seed, each in enumerate(heard):
        assert each.end().reason == "length"
        assert each.ids == greedy(model, draw(6, seed), 60)


def test_hits_and_misses_of_each_layer_add_up(served: Any) -> None:
    s = served(capacity=5, parts={"prefetch": "off"})
    for seed in range(3):
        s.ask(draw(9, seed), 10).end()
    found = s.engine.stats()["experts"]
    layers = found["layers"]
    assert len(layers) == 2
    assert sum(each["requests"] for each in layers) == found["requests"] > 0
    assert sum(each["hits"] for each in layers) == found["hits"]
    assert all(each["hits"] + each["misses"] == each["requests"] for each in layers)


def test_a_prompt_waits_for_others_as_long_as_it_is_told(served: Any) -> None:
    s = served(batch_delay=400.0, journal=Journal(), max_batch=3)
    first = s.ask(draw(6), 2)
    time.sleep(0.05)
    second = s.ask(draw(6, 1), 2)
    assert first.end().ttft_s >= 0.39
    assert second.end().ttft_s < 0.39
    assert s.engine.journal.events[0] == Pass(((0, 0, 6), (1, 0, 6)))
    begin = time.monotonic()
    for each in [s.ask(draw(6, seed), 2) for seed in (2, 3, 4)]:  # no place is left to wait for
        each.end()
    assert time.monotonic() - begin < 0.39


# ---- what was read before


def test_a_second_turn_reads_only_what_is_new(served: Any, model: Any) -> None:
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
    assert Reuse(1, 0, 69) in s.engine.journal.events
    assert s.engine.stats()["tokens"]["reused"] == 69 + 40 + len(turn) - 1


def test_the_same_prompt_several_times_is_read_once(served: Any, model: Any) -> None:
    s = served()
    prompt = draw(150)
    heard = [s.ask(prompt, 5) for _ in range(4)]
    reused = [each.end().reused_tokens for each in heard]
    assert sorted(reused) == [0, 149, 149, 149]
    for each in heard:
        assert each.ids == greedy(model, prompt, 5)


def test_nothing_is_kept_where_that_is_switched_off(served: Any) -> None:
    s = served(no_prefix_reuse=True)
    for _ in range(2):
        assert s.ask(draw(60), 3).end().reused_tokens == 0
    assert s.engine.stats()["prefixes"]["entries"] == 0


def test_keys_and_values_stay_within_their_memory(served: Any) -> None:
    s = served(context=100, kv_memory="400KiB", max_batch=8)
    limit = 400 << 10
    seen = []
    heard = [s.ask(draw(60, seed), 20) for seed in range(8)]
    while any(each.finished is None for each in heard):
        stats = s.engine.stats()
        seen.append((stats["kv"]["reserved_bytes"] + stats["prefixes"]["bytes"],
                     stats["queue"]["running"]))  # fmt: skip
        time.sleep(0.02)
    assert all(each.end().reason == "length" for each in heard)
    assert max(nbytes for nbytes, _ in seen) <= limit
    assert max(count for _, count in seen) < 8  # not all had room at once
    assert s.engine.stats()["prefixes"]["bytes"] <= limit // 2


def test_slots_make_room_for_all_requests_and_come_back(
    served: Any, folder: Any, model: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("greenroom.hf.growth.BLOCK", 32)
    one = kv_bytes(Draft.of(folder).model, block=512, room=600).total(600)
    s = served(capacity=16, context=600, leaving=4, max_batch=3, prefill_chunk=64,
               kv_memory=one, prefix_share="100%")  # fmt: skip
    system = draw(100)
    heard, least = [], 16
    for seed in range(3):
        heard.append(s.ask([*system, *draw(20, seed)], 40))
    while any(each.finished is None for each in heard):
        memory, kv = s.engine.stats()["memory"], s.engine.stats()["kv"]
        least = min(least, memory["slots"])
        assert kv["reserved_bytes"] <= kv["limit_bytes"] <= s.engine.greenroom.growth.most()
        time.sleep(0.02)
    assert least < 12
    for seed, each in enumerate(heard):
        assert each.end().reason == "length"
        assert each.ids == greedy(model, [*system, *draw(20, seed)], 40)
    assert sum(each.end().reused_tokens >= 100 for each in heard) == 2
    s.engine.admission.prefixes.shrink(0)
    s.ask(draw(4), 2).end()
    assert s.engine.stats()["memory"]["slots"] > least


@pytest.mark.parametrize(
    ("given", "most", "said"),
    [
        ("1KiB", None, "has no room for one context of 100 tokens: it takes 10 KiB; --kv-memory"),
        ("10%", None, "is a share of the budget: give --memory, or an amount"),
        ("1MiB", 50 << 10, "the budget of 1 MiB leaves 50 KiB for keys and values"),
    ],
)
def test_memory_for_keys_and_values_that_cannot_be(given: str, most: Any, said: str) -> None:
    with pytest.raises(BudgetError) as caught:
        kv_limit(attached(most), ServeConfig(kv_memory=given))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def attached(most: int | None) -> Any:
    """A model's cache of experts whose contexts take 10 KiB, in a budget of 1 MiB if in any."""
    return SimpleNamespace(
        keys_values=SimpleNamespace(total=lambda tokens: 10 << 10),
        parts=SimpleNamespace(context=100, budget_bytes=None if most is None else 1 << 20),
        growth=None if most is None else SimpleNamespace(most=lambda: most),
    )


def test_memory_for_keys_and_values_by_default_and_as_asked() -> None:
    assert kv_limit(attached(None), ServeConfig(max_batch=3)) == 30 << 10
    assert kv_limit(attached(200 << 10), ServeConfig(max_batch=3)) == 30 << 10
    assert kv_limit(attached(80 << 10), ServeConfig(max_batch=3)) == 20 << 10  # a quarter
    assert kv_limit(attached(20 << 10), ServeConfig(max_batch=3)) == 10 << 10  # one, at least
    assert kv_limit(attached(200 << 10), ServeConfig(kv_memory="10%")) == (1 << 20) // 10
    assert kv_limit(attached(None), ServeConfig(kv_memory="64KiB")) == 64 << 10


def test_what_was_learned_is_there_for_the_next_one(
    folder: Any, monkeypatch: Any, tmp_path: Any
) -> None:
    monkeypatch.setenv("GREENROOM_LEARNED", "on")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    load = LoadConfig(cache="50%", kernels="eager", policy="lru", context=200)
    warmed = []
    for _ in range(2):
        engine = start(str(folder), load, ServeConfig())
        until = time.monotonic() + PATIENCE
        while engine.state()[0] == "loading" and time.monotonic() < until:
            time.sleep(0.01)
        warmed.append(engine.greenroom.warmed)
        heard = Heard()
        engine.submit(Request(tuple(draw(6)), 30, Sampling(0.0), end_ids=()), heard)
        assert heard.end().reason == "length"
        assert "experts in slots" in engine.summary
        engine.stop(5)
    assert list((tmp_path / "greenroom" / "learned").glob("*.safetensors"))
    assert warmed[0] == 0 < warmed[1]


# ---- the same bits


def replayed(folder: Any, journal: Journal, **options: Any) -> dict[int, list[int]]:
    """The tokens of a journal's requests in the same passes, over another cache of experts."""
    from greenroom.hf.together import Batch
    from greenroom.server.journal import replay
    from greenroom.server.sampling import Sampler

    other = Served(folder, **options)
    try:
        own = other.engine.model.generation_config
        samplers = {n: Sampler(r, own, 320) for n, r in journal.requests.items()}
        found = replay(Batch(other.engine.model), journal, samplers)
        return {number: [token.id for token in tokens] for number, tokens in found.items()}
    finally:
        other.close()


def test_the_same_passes_give_the_same_bits_whatever_the_cache_held(served: Any) -> None:
    folder = cached_tiny("qwen3_moe", tokenizer=True, dtype="bfloat16", hidden_size=64, head_dim=16)
    journal = Journal()
    s = Served(folder, journal=journal, prefill_chunk=16, capacity=5,
               store={"fails": lambda read: read % 41 == 0})  # fmt: skip
    system = draw(50, 99)
    heard = []
    try:
        for seed, (prompt, new) in enumerate(MIXED * 2):
            ids = [*system, *draw(prompt, seed)] if seed % 2 else draw(prompt, seed)
            sampling = Sampling(temperature=0.8, seed=seed)
            heard.append(s.ask(ids, new, sampling=sampling, top_logprobs=3))
        for each in heard:
            assert each.end().reason == "length"
    finally:
        s.close()
    assert any(isinstance(event, Reuse) for event in journal.events)
    found = replayed(folder, journal, capacity=16)
    assert found == {number: each.ids for number, each in enumerate(heard)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_batch_invariant_answers_are_those_of_the_request_alone(dtype: str) -> None:
    options = {"hidden_size": 64, "head_dim": 16} if dtype == "bfloat16" else {}
    folder = cached_tiny("qwen3_moe", tokenizer=True, dtype=dtype, **options)
    asked = [(draw(prompt, seed), new) for seed, (prompt, new) in enumerate(MIXED)]
    asked += [([*asked[4][0], *draw(5, 77)], 4)]
    s = Served(folder, batch_invariant=True, prefill_chunk=16, capacity=5)
    try:
        assert (s.engine.batch.apart == "") == (dtype == "bfloat16")
        together = [s.ask(ids, new, top_logprobs=5) for ids, new in asked[:-1]]
        for each in together:
            each.end()
        together.append(s.ask(*asked[-1], top_logprobs=5))
        assert together[-1].end().reused_tokens == 80  # in whole chunks: 5 of 16
    finally:
        s.close()
    for (ids, new), each in zip(asked, together, strict=True):
        alone = Served(folder, batch_invariant=True, prefill_chunk=16, capacity=16)
        try:
            heard = alone.ask(ids, new, top_logprobs=5)
            heard.end()
            assert heard.tokens == each.tokens  # log-probabilities too, to the last bit
        finally:
            alone.close()
