"""Answers with speculation are those without it, token by token and bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from greenroom.core.speculation import speculation
from greenroom.errors import StoreError
from greenroom.server.engine.journal import Journal
from greenroom.server.engine.requests import Request, Sampling
from tests.models import cached_tiny
from tests.server.engine.test_bits import replayed_tokens
from tests.server.rig import GREEDY, AnswerRecorder, Served, draw


class EagerTimes:
    """Times of passes by which every draft is worth it."""

    is_ready = True

    def record(self, tokens: int, seconds: float) -> None:
        pass

    def seconds(self, tokens: int) -> float:
        return 1.0


def bfloat16_folder() -> Any:
    return cached_tiny("qwen3_moe", tokenizer=True, dtype="bfloat16", hidden_size=64, head_dim=16)


@pytest.fixture
def engines(monkeypatch: Any, no_threads_left: None) -> Iterator[Any]:
    monkeypatch.setattr(speculation, "PassTimes", EagerTimes)
    made: list[Served] = []

    def make(**options: Any) -> Served:
        made.append(Served(bfloat16_folder(), **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


# A low temperature, and a prompt that repeats itself.
SETTINGS = {
    "greedy": Sampling(temperature=0.0),
    "sampled": Sampling(temperature=0.7, seed=5),
    "cut": Sampling(temperature=0.5, top_p=0.9, top_k=20, seed=6),
    "penalties": Sampling(temperature=0.5, repetition_penalty=1.05, presence_penalty=0.1, seed=7),
}


PROMPTS = [draw(12, seed) * 3 for seed in range(3)]


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_are_those_without_drafts(engines: Any, name: str) -> None:
    drafted, plain = engines(speculate="lookup"), engines()
    drafted.engine.drafts.speculation.guard.passed = lambda *args: None  # drafts throughout
    for prompt in PROMPTS:
        options = {"sampling": SETTINGS[name], "top_logprobs": 3}
        one, other = (each.ask(prompt, 60, **options) for each in (drafted, plain))
        assert one.end().reason == other.end().reason == "length"
        assert one.tokens == other.tokens  # log-probabilities too, to the last bit
    counts = drafted.engine.drafts.speculation.counts
    assert counts.passes > 0
    assert 0 < counts.accepted < counts.drafted
    stats = drafted.engine.stats()
    assert stats["speculation"]["accepted"] == counts.accepted
    assert stats["passes"]["count"] < plain.engine.stats()["passes"]["count"]
    assert stats["passes"]["tokens"] == plain.engine.stats()["passes"]["tokens"]
    assert "speculation" not in plain.engine.stats()
    assert "speculation by lookup" in drafted.engine.summary
    assert "speculation" not in plain.engine.summary


def test_concurrent_answers_are_those_of_requests_alone(engines: Any) -> None:
    drafted, plain = (
        engines(speculate="lookup", batch_invariant=True),
        engines(batch_invariant=True, max_batch=1),
    )
    drafted.engine.drafts.speculation.guard.passed = lambda *args: None
    asked = [
        (prompt, sampling) for prompt in PROMPTS[:2] for sampling in list(SETTINGS.values())[:3]
    ]
    together = [drafted.ask(prompt, 40, sampling=sampling) for prompt, sampling in asked]
    for each, (prompt, sampling) in zip(together, asked, strict=True):
        assert each.end().reason == "length", each.end().error
        alone = plain.ask(prompt, 40, sampling=sampling)
        alone.end()
        assert each.ids == alone.ids
    assert drafted.engine.drafts.speculation.counts.accepted > 0


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 20])
def test_an_answer_ends_in_the_middle_of_a_draft(engines: Any, limit: int) -> None:
    drafted, plain = engines(speculate="lookup"), engines()
    full = plain.ask(PROMPTS[1], 60)
    full.end()
    assert drafted.ask(PROMPTS[1], 60).end().reason == "length"  # it is in the history
    one = drafted.ask(PROMPTS[1], limit)
    assert one.end().reason == "length"
    assert one.ids == full.ids[:limit]
    end = full.ids[limit]  # an end token that a draft contains
    first = full.ids.index(end)
    one = drafted.ask(PROMPTS[1], 60, ends=(end,))
    assert one.end().reason == "stop"
    assert one.ids == full.ids[: first + 1]
    # The keys and values that it left in the prefix cache are those of its tokens.
    more = [*PROMPTS[1], *one.ids, 5, 6]
    again, other = drafted.ask(more, 20), plain.ask(more, 20)
    assert again.end().reused_tokens > 0
    other.end()
    assert again.ids == other.ids


def test_earlier_answers_are_drafted_from(engines: Any) -> None:
    drafted = engines(speculate="lookup", no_prefix_reuse=True)
    drafted.engine.drafts.speculation.guard.passed = lambda *args: None
    counts = drafted.engine.drafts.speculation.counts
    first = drafted.ask(draw(20, 50), 40)
    first.end()
    before = counts.accepted
    again = drafted.ask(draw(20, 50), 40)
    again.end()
    assert again.ids == first.ids
    assert counts.accepted - before > 25  # nearly every token of it


def test_a_request_is_cancelled_between_tokens_of_a_draft(engines: Any) -> None:
    drafted = engines(speculate="lookup")
    full = drafted.ask(PROMPTS[1], 60)
    full.end()
    recorder = AnswerRecorder()
    recorder.on_token = lambda _: recorder.cancel() if len(recorder.tokens) == 9 else None
    recorder.ticket = drafted.engine.submit(
        Request(tuple(PROMPTS[1]), 60, GREEDY, end_ids=()), recorder
    )
    assert recorder.end().reason == "cancelled"
    assert recorder.ids == full.ids[:9]


def test_a_failed_pass_is_repeated_without_drafts(engines: Any) -> None:
    drafted = engines(speculate="lookup")
    full = drafted.ask(PROMPTS[1], 60)
    full.end()
    verify, failed = drafted.engine.drafts.verify, []

    def fail_first(caches: Any) -> Any:
        logits = verify(caches)
        if not failed:
            failed.append(1)
            raise StoreError("a read failed")
        return logits

    drafted.engine.drafts.verify = fail_first
    again = drafted.ask(PROMPTS[1], 60)
    assert again.end().reason == "length"
    assert again.ids == full.ids
    assert failed
    assert drafted.engine.passes.faults == 1


def test_a_journal_of_passes_with_drafts_can_be_computed_again(engines: Any) -> None:
    journal = Journal()
    drafted = engines(speculate="lookup", journal=journal)
    recorders = [drafted.ask(PROMPTS[n % 2], 30, sampling=SETTINGS["sampled"]) for n in range(4)]
    for each in recorders:
        each.end()
    assert drafted.engine.drafts.speculation.counts.accepted > 0
    drafted.close()
    replayed = replayed_tokens(bfloat16_folder(), journal, capacity=16)
    assert replayed == {number: each.ids for number, each in enumerate(recorders)}


def test_a_model_that_cannot_verify_drafts_says_so(served: Any) -> None:
    engine = served(speculate="lookup").engine  # float32
    assert "no speculation: Qwen3MoeForCausalLM: not every layer" in engine.summary
    assert engine.drafts.speculation.counts.passes == 0
