"""Log-probabilities of a prompt's own tokens: transformers' own, however the prompt is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from greenroom.errors import ModelError
from greenroom.server.engine.journal import Journal, Pass
from greenroom.server.engine.requests import Token
from greenroom.server.engine.tokens import scores
from greenroom.server.engine.tokens.scores import PromptScores
from tests.server.rig import PATIENCE, Heard, Served, draw


def wanted(model: Any, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [tokens, V] of what follows each token."""
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return found


def own(heard: Heard) -> list[float]:
    """The log-probabilities of all tokens but the first, which has none."""
    assert heard.prompt is not None
    assert heard.prompt[0].logprob is None
    assert heard.prompt[0].top == ()
    return [token.logprob for token in heard.prompt[1:] if token.logprob is not None]


def check(heard: Heard, ids: list[int], model: Any, top: int, near: float = 1e-4) -> None:
    """As transformers has them, near enough."""
    expected = wanted(model, ids)[:-1]
    assert heard.prompt is not None
    assert [token.id for token in heard.prompt] == ids
    rows = expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(own(heard)), rows, rtol=0, atol=near)
    for token, row in zip(heard.prompt[1:], expected, strict=True):
        assert len(token.top) == top
        values = torch.tensor([value for _, value in token.top])
        torch.testing.assert_close(values, row.topk(top).values, rtol=0, atol=near)
        assert all(abs(float(row[each]) - value) <= near for each, value in token.top)


def test_eager_kernels_give_transformers_own_bits(served: Any, model: Any) -> None:
    s, ids = served(parts={"kernels": "eager"}), draw(90, 5)
    heard = s.ask(ids, 0, prompt_logprobs=3)
    finished = heard.end()
    assert (finished.reason, finished.new_tokens, finished.ttft_s) == ("length", 0, None)
    check(heard, ids, model, 3, near=0.0)


def test_they_do_not_depend_on_what_was_read_before(served: Any, model: Any) -> None:
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


def test_a_prompt_that_is_read_in_parts_beside_others(served: Any, model: Any) -> None:
    """Its parts end anywhere; prompts without scores and answers are in the same passes."""
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

    def noting(self: PromptScores, logits: torch.Tensor, first: int) -> None:
        rows.append(len(logits))
        add(self, logits, first)

    monkeypatch.setattr(PromptScores, "add", noting)
    monkeypatch.setattr(scores, "LOGITS_BYTES", 20 * 320 * 4)
    s, ids = served(prefill_chunk=16, batch_invariant=invariant), draw(50)
    heard = s.ask(ids, 1, prompt_logprobs=0)
    heard.end()
    assert rows == ([16, 16, 16, 2] if invariant else [20, 20, 10])
    check(heard, ids, model, 0)


def test_one_token_has_nothing_before_it(plain: Served) -> None:
    heard = plain.ask([7], 1, prompt_logprobs=2)
    heard.end()
    assert heard.prompt == (Token(7),)
    assert len(heard.tokens) == 1


def test_nothing_more_is_computed_than_the_prompt(served: Any) -> None:
    s = served()
    heard = s.ask(draw(30), 0)
    assert heard.end().reason == "length"
    assert (heard.prompt, heard.tokens) == (None, [])
    assert s.engine.stats()["passes"]["tokens"] == 30


def test_reads_that_fail_on_the_way_change_nothing(served: Any, model: Any) -> None:
    s = served(capacity=4, store={"fails": lambda read: read in (7, 30, 31)}, prefill_chunk=16)
    answers = s.ask(draw(4), 30)
    heard = s.ask(draw(70, 1), 1, prompt_logprobs=1)
    assert heard.end().reason == "length"
    check(heard, draw(70, 1), model, 1)
    answers.cancel()
    assert s.engine.stats()["passes"]["faults"]


def test_one_that_is_cancelled_or_late_frees_its_place(
    served: Any, model: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(scores, "LOGITS_BYTES", 5 * 320 * 4)  # twenty passes
    s = served(capacity=2, store={"latency": 0.01})
    gone = s.ask(draw(100), 1, prompt_logprobs=1)
    late = s.ask(draw(100, 1), 1, prompt_logprobs=1, timeout_s=0.1)
    gone.cancel()
    assert gone.end().reason == "cancelled"
    assert late.end().reason == "timeout"
    assert (gone.prompt, gone.tokens, late.prompt, late.tokens) == (None, [], None, [])
    heard = s.ask(draw(20, 2), 1, prompt_logprobs=1)
    assert heard.end().reason == "length"
    check(heard, draw(20, 2), model, 1)
    assert s.engine.stats()["kv"]["reserved_bytes"] == 0


def test_logits_that_are_not_finite_end_their_own_request(served: Any, monkeypatch: Any) -> None:
    s = served()
    run = s.engine.batch.__call__

    def spoiled(ids: Any, caches: Any, scored: Any) -> Any:
        found = run(ids, caches, scored)
        return [each / 0 if each.dim() == 2 else each for each in found]

    monkeypatch.setattr(s.engine.passes, "_batch", spoiled)
    lost, other = s.ask(draw(20), 2, prompt_logprobs=1), s.ask(draw(20, 1), 5)
    finished = lost.end()
    assert isinstance(finished.error, ModelError)
    assert other.end().reason == "length"
