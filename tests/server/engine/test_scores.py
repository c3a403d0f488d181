"""Log-probabilities of a prompt's tokens equal those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from greenroom.errors import ModelError
from greenroom.server.engine.journal import Journal, Pass
from greenroom.server.engine.requests import Token
from greenroom.server.engine.tokens import scores
from greenroom.server.engine.tokens.scores import PromptScores
from tests.server.rig import PATIENCE, AnswerRecorder, Served, draw


def expected_logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] of the token after each token."""
    with torch.inference_mode():
        logprobs: torch.Tensor = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return logprobs


def prompt_logprobs_of(recorder: AnswerRecorder) -> list[float]:
    """The log-probabilities of all prompt tokens but the first, which has none."""
    assert recorder.prompt is not None
    assert recorder.prompt[0].logprob is None
    assert recorder.prompt[0].top == ()
    return [token.logprob for token in recorder.prompt[1:] if token.logprob is not None]


def check(
    recorder: AnswerRecorder, ids: list[int], model: Any, top: int, near: float = 1e-4
) -> None:
    """Compare the log-probabilities of a prompt with those of transformers."""
    expected = expected_logprobs(model, ids)[:-1]
    assert recorder.prompt is not None
    assert [token.id for token in recorder.prompt] == ids
    rows = expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(prompt_logprobs_of(recorder)), rows, rtol=0, atol=near)
    for token, row in zip(recorder.prompt[1:], expected, strict=True):
        assert len(token.top) == top
        values = torch.tensor([value for _, value in token.top])
        torch.testing.assert_close(values, row.topk(top).values, rtol=0, atol=near)
        assert all(abs(float(row[each]) - value) <= near for each, value in token.top)


def test_eager_kernels_give_the_bits_of_transformers(served: Any, model: Any) -> None:
    s, ids = served(setup_options={"kernels": "eager"}), draw(90, 5)
    recorder = s.ask(ids, 0, prompt_logprobs=3)
    finished = recorder.end()
    assert (finished.reason, finished.new_tokens, finished.ttft_s) == ("length", 0, None)
    check(recorder, ids, model, 3, near=0.0)


def test_log_probabilities_do_not_depend_on_cached_prefixes(served: Any, model: Any) -> None:
    s, ids = served(), draw(90, 5)
    first = s.ask(ids, 2, prompt_logprobs=2, top_logprobs=2)
    first.end()
    plain = s.ask(ids, 2)
    assert plain.end().reused_tokens >= 80
    again = s.ask(ids, 2, prompt_logprobs=2, top_logprobs=2)
    assert again.end().reused_tokens == 0
    assert again.prompt == first.prompt
    assert again.tokens == first.tokens
    check(first, ids, model, 2)
    assert first.ids == plain.ids


def test_a_scored_prompt_is_computed_in_chunks_with_others(served: Any, model: Any) -> None:
    """Other prompts and answers are in the same passes."""
    s = served(prefill_chunk=16, journal=Journal(), max_batch=4)
    answers = s.ask(draw(4), 60)
    assert answers.first.wait(PATIENCE)
    long = [s.ask(draw(count, count), 3, prompt_logprobs=1) for count in (70, 33)]
    other = s.ask(draw(40, 9), 3)
    for each, count in zip(long, (70, 33), strict=True):
        assert each.end().reason == "length"
        check(each, draw(count, count), model, 1)
    assert other.end().reason == "length"
    assert other.prompt is None
    answers.cancel()
    shared = [event for event in s.engine.journal.events if isinstance(event, Pass)]
    assert max(len(event.shares) for event in shared) >= 2


@pytest.mark.parametrize("invariant", [False, True])
def test_logits_of_a_pass_are_bounded(
    served: Any, model: Any, monkeypatch: Any, invariant: bool
) -> None:
    rows: list[int] = []
    add = PromptScores.add

    def counting_add(self: PromptScores, logits: torch.Tensor, first: int) -> None:
        rows.append(len(logits))
        add(self, logits, first)

    monkeypatch.setattr(PromptScores, "add", counting_add)
    monkeypatch.setattr(scores, "LOGITS_BYTES", 20 * 320 * 4)
    s, ids = served(prefill_chunk=16, batch_invariant=invariant), draw(50)
    recorder = s.ask(ids, 1, prompt_logprobs=0)
    recorder.end()
    assert rows == ([16, 16, 16, 2] if invariant else [20, 20, 10])
    check(recorder, ids, model, 0)


def test_a_prompt_of_one_token_has_no_log_probabilities(plain: Served) -> None:
    recorder = plain.ask([7], 1, prompt_logprobs=2)
    recorder.end()
    assert recorder.prompt == (Token(7),)
    assert len(recorder.tokens) == 1


def test_without_new_tokens_only_the_prompt_is_computed(served: Any) -> None:
    s = served()
    recorder = s.ask(draw(30), 0)
    assert recorder.end().reason == "length"
    assert (recorder.prompt, recorder.tokens) == (None, [])
    assert s.engine.stats()["passes"]["tokens"] == 30


def test_failed_reads_do_not_change_log_probabilities(served: Any, model: Any) -> None:
    s = served(capacity=4, store={"fails": lambda read: read in (7, 30, 31)}, prefill_chunk=16)
    answers = s.ask(draw(4), 30)
    recorder = s.ask(draw(70, 1), 1, prompt_logprobs=1)
    assert recorder.end().reason == "length"
    check(recorder, draw(70, 1), model, 1)
    answers.cancel()
    assert s.engine.stats()["passes"]["faults"]


def test_a_cancelled_or_late_scored_prompt_frees_its_place(
    served: Any, model: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(scores, "LOGITS_BYTES", 5 * 320 * 4)  # twenty passes
    s = served(capacity=2, store={"latency": 0.01})
    cancelled = s.ask(draw(100), 1, prompt_logprobs=1)
    late = s.ask(draw(100, 1), 1, prompt_logprobs=1, timeout_s=0.1)
    cancelled.cancel()
    assert cancelled.end().reason == "cancelled"
    assert late.end().reason == "timeout"
    assert (cancelled.prompt, cancelled.tokens, late.prompt, late.tokens) == (None, [], None, [])
    recorder = s.ask(draw(20, 2), 1, prompt_logprobs=1)
    assert recorder.end().reason == "length"
    check(recorder, draw(20, 2), model, 1)
    assert s.engine.stats()["kv"]["reserved_bytes"] == 0


def test_infinite_prompt_logits_end_only_their_request(served: Any, monkeypatch: Any) -> None:
    s = served()
    run = s.engine.batch.__call__

    def spoiled(*arguments: Any) -> Any:
        outputs = run(*arguments)
        return [each / 0 if each.dim() == 2 else each for each in outputs]

    monkeypatch.setattr(s.engine.passes, "_batch", spoiled)
    lost, other = s.ask(draw(20), 2, prompt_logprobs=1), s.ask(draw(20, 1), 5)
    finished = lost.end()
    assert isinstance(finished.error, ModelError)
    assert other.end().reason == "length"
