"""Several requests at once: their answers, and requests that are refused."""

from __future__ import annotations

import time
from typing import Any

import pytest

from greenroom.errors import (
    TooLong,
    UsageError,
)
from greenroom.server.engine.journal import Journal, Pass
from greenroom.server.engine.requests import Busy, Sampling
from tests.server.engine.conftest import MIXED
from tests.server.rig import PATIENCE, Served, draw, greedy


def test_a_prompt_alone_is_computed_in_blocks(served: Any) -> None:
    """Also beside answers, a prompt's chunk has at most a block's tokens."""
    s = served(journal=Journal(), prefill_chunk=64, setup_options={"prompt_block": 24})
    s.ask(draw(60, 1), 2).end()
    passes = [each.shares[0][2] for each in s.engine.journal.events if isinstance(each, Pass)]
    assert passes[:3] == [24, 24, 12]
    assert s.engine.config.prefill_chunk == 24


def test_batched_answers_equal_those_of_transformers(served: Any, model: Any) -> None:
    s = served(prefill_chunk=16, max_batch=4)
    requests = [(draw(prompt, seed), new) for seed, (prompt, new) in enumerate(MIXED)]
    recorders = [s.ask(ids, new) for ids, new in requests]
    for each, (ids, new) in zip(recorders, requests, strict=True):
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


def test_one_request_at_a_time_is_said_so(served: Any) -> None:
    assert served(max_batch=1).engine.summary.startswith("one request at a time, with ")


def test_answers_share_forward_passes(served: Any) -> None:
    s = served(journal=Journal())
    recorders = [s.ask(draw(4, seed), 6) for seed in range(3)]
    for each in recorders:
        each.end()
    passes = [event for event in s.engine.journal.events if isinstance(event, Pass)]
    assert max(len(event.shares) for event in passes) == 3
    assert s.engine.stats()["passes"]["count"] == len(passes)


def test_a_long_prompt_is_computed_in_chunks_while_answers_go_on(served: Any) -> None:
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


def test_a_prompt_is_one_pass_if_no_answer_runs(served: Any) -> None:
    s = served(prefill_chunk=16, journal=Journal())
    s.ask(draw(150), 1).end()
    assert s.engine.journal.events[0] == Pass(((0, 0, 150),))


def test_an_end_token_ends_an_answer_and_is_sent(plain: Served, model: Any) -> None:
    ids = draw(9, 3)
    expected = greedy(model, ids, 12)
    recorder = plain.ask(ids, 12, ends=(expected[4],))
    assert recorder.end().reason == "stop"
    assert recorder.ids == expected[: expected.index(expected[4]) + 1]


def test_the_models_end_tokens_are_the_default(served: Any, folder: Any, model: Any) -> None:
    ids = draw(9, 3)
    expected = greedy(model, ids, 12)
    s = served()
    s.engine.end_ids = (expected[2],)  # random weights seldom give the real one
    recorder = s.ask(ids, 12, ends=None)
    assert recorder.end().reason == "stop"
    assert recorder.ids == expected[: expected.index(expected[2]) + 1]


def test_sampled_tokens_do_not_depend_on_the_batch(served: Any) -> None:
    sampling = Sampling(temperature=0.9, top_p=0.9, seed=11)
    s = served()
    first_answer = s.ask(draw(12), 20, sampling=sampling)
    first_answer.end()
    others = [s.ask(draw(9, seed), 25, sampling=Sampling(1.0, seed=seed)) for seed in range(3)]
    second_answer = s.ask(draw(12), 20, sampling=sampling)
    other = s.ask(draw(12), 20, sampling=Sampling(temperature=0.9, top_p=0.9, seed=12))
    assert second_answer.end().new_tokens == 20
    assert second_answer.ids == first_answer.ids
    other.end()
    assert other.ids != first_answer.ids
    for each in others:
        each.end()


def test_an_answer_follows_its_grammar(plain: Served) -> None:
    pytest.importorskip("llguidance")
    recorder = plain.ask(draw(5), 40, grammar='start: "abc" /[0-9]{2,4}/ "z"')
    assert recorder.end().reason == "stop"
    text = plain.engine.tokenizer.decode(recorder.ids, skip_special_tokens=True)
    assert text.startswith("abc")
    assert text.endswith("z")
    assert text[3:-1].isdigit()
    with pytest.raises(UsageError, match="the grammar is not valid: "):
        plain.ask(draw(5), 4, grammar="start: nothing-that-is-defined")


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        ({"ids": []}, UsageError, "the prompt is empty"),
        ({"ids": [5, 9999]}, UsageError, "does not have: ids must be from 0 to 319"),
        ({"ids": [-1]}, UsageError, "a token id that the model does not have"),
        ({"ids": [5], "new": -1}, UsageError, "max_new_tokens must be at least 0, got -1"),
        ({"ids": [5], "timeout_s": 0.0}, UsageError, "timeout_s must be above 0"),
        (
            {"ids": [5] * 300},
            TooLong,
            "300 tokens and the answer may have 8: .* context of 300 tokens",
        ),
        ({"ids": [5], "new": 1 << 40}, TooLong, "must fit the context of 300 tokens"),
        (
            {"ids": [5], "sampling": Sampling(top_p=2.0)},
            UsageError,
            "top_p must be above 0 and at most 1",
        ),
        ({"ids": [5], "top_logprobs": 1000}, UsageError, "top_logprobs must be from 0 to 100"),
        ({"ids": [5], "prompt_logprobs": 101}, UsageError, "prompt_logprobs must be from 0 to 100"),
    ],
)
def test_impossible_requests_are_refused(
    plain: Served, request_: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        plain.ask(request_.pop("ids"), request_.pop("new", 8), **request_)
    assert plain.engine.state() == ("ready", 1.0, "")


def test_equal_requests_get_separate_answers(plain: Served) -> None:
    both = [plain.ask(draw(6), 5, name="same") for _ in range(2)]
    assert [each.end().reason for each in both] == ["length", "length"]
    assert both[0].ids == both[1].ids


def test_a_full_queue_refuses_with_a_time_to_retry(served: Any) -> None:
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


def test_hits_and_misses_of_each_layer_add_up(served: Any) -> None:
    s = served(capacity=5, setup_options={"prefetch": "off"})
    for seed in range(3):
        s.ask(draw(9, seed), 10).end()
    experts = s.engine.stats()["experts"]
    layers = experts["layers"]
    assert len(layers) == 2
    assert sum(each["requests"] for each in layers) == experts["requests"] > 0
    assert sum(each["hits"] for each in layers) == experts["hits"]
    assert all(each["hits"] + each["misses"] == each["requests"] for each in layers)


def test_a_delay_that_ends_while_the_engine_looks_at_it_is_over(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine looks whether the delay is over, and then how long to sleep."""
    s, looks = served(), iter([1e-9, 1e-9])  # after the admission, and before the sleep

    def delay_s(running: Any) -> float:
        return next(looks, -1.0) if any(not each.begun for each in running) else 0.0

    monkeypatch.setattr(s.engine.admission, "delay_s", delay_s)
    recorder = s.ask(draw(5), 2)
    assert recorder._end.wait(10), "the engine sleeps"


def test_a_prompt_waits_for_others_as_long_as_batch_delay(served: Any) -> None:
    s = served(batch_delay=1000.0, journal=Journal(), max_batch=3)
    first = s.ask(draw(6), 2)
    time.sleep(0.05)
    second = s.ask(draw(6, 1), 2)
    assert first.end().ttft_s >= 0.99
    assert second.end().ttft_s < first.end().ttft_s  # it came later, and waited for nobody else
    assert s.engine.journal.events[0] == Pass(((0, 0, 6), (1, 0, 6)))
    begin = time.monotonic()
    for each in [s.ask(draw(6, seed), 2) for seed in (2, 3, 4)]:  # no place is left to wait for
        each.end()
    assert time.monotonic() - begin < 0.99


def test_slots_are_divided_anew_only_while_the_engine_is_idle(served: Any, monkeypatch) -> None:
    """After each round the cache is told whether a request waits or runs: at the end none does."""
    s, told = served(), []
    monkeypatch.setattr(s.engine.greenroom, "reconfigure", lambda idle: told.append(idle))
    for recorder in [s.ask(draw(4, seed), 6) for seed in range(2)]:
        recorder.end()
    s.close()
    assert len(told) >= 6
    assert told[-1]
    assert not any(told[:5])
