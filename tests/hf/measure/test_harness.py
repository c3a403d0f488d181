"""One load whose cache is exchanged: what is counted, and what caches begin with."""

from __future__ import annotations

import pytest

from greenroom.errors import UsageError
from greenroom.hf.measure.harness import Harness
from greenroom.trace.prompts import Prompt
from tests.hf.measure.conftest import BASE

PROMPTS = [Prompt("a few words", "one"), Prompt("and some other ones", "two")]


def test_requests_and_misses_are_those_of_the_counted_passes(harness: Harness):
    greenroom = harness.attach(BASE)
    done = harness.play(PROMPTS[:1], 16, settle=6, raw=True)
    tokens = len(done.tokens[0])
    assert len(done.gaps) == tokens - 1 - 6
    layers, top_k = len(harness.setup.catalog.layers), 2
    assert done.requests == len(done.gaps) * layers * top_k
    assert 0 < done.misses <= done.requests
    counts = greenroom.driver.scheduler.counts
    assert counts.requests > done.requests  # the prompt, and the first tokens after it
    assert (
        done.bytes_read == done.misses * harness.setup.catalog.all_experts_bytes // harness.experts
    )


def test_an_answer_without_counted_tokens_is_refused(harness: Harness):
    harness.attach(BASE)
    with pytest.raises(UsageError, match=r"the first 8 tokens of an answer are not counted.*raise"):
        harness.play(PROMPTS[:1], 4, settle=8, raw=True)


def test_an_answer_that_the_model_would_end_goes_on_to_its_last_token(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
):
    harness.attach(BASE)
    free = harness.play(PROMPTS[:1], 16, raw=True)
    monkeypatch.setattr(harness.model.generation_config, "eos_token_id", free.tokens[0][1])
    done = harness.play(PROMPTS[:1], 16, raw=True)
    assert len(done.tokens[0]) == 16
    assert done.tpot_s > 0


def test_caches_begin_with_the_experts_used_most(harness: Harness):
    assert harness.attach(BASE).driver.scheduler.residents().size == 0
    harness.play(PROMPTS, 16, raw=True)
    assert harness.attach(BASE).driver.scheduler.residents().size == 0  # not learned yet
    harness.learn()
    again = harness.attach(BASE)
    assert again.driver.scheduler.residents().size > 0
    assert again.driver.request_counts.sum() == 0
    all_resident = harness.attach(BASE, harness.experts)
    harness.fill()
    assert all_resident.driver.scheduler.residents().size == harness.experts
