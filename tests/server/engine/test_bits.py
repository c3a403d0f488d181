"""Answers are bitwise equal, whatever the expert cache holds and the batch contains."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from greenroom.server.engine.journal import Journal, PrefixReuse
from greenroom.server.engine.requests import Sampling
from tests.benchmarks.harness import FOLDER
from tests.models import cached_tiny
from tests.server.engine.conftest import MIXED
from tests.server.rig import Served, draw

REPLAY = runpy.run_path(str(FOLDER / "passes.py"))["replay"]


def replayed_tokens(folder: Any, journal: Journal, **options: Any) -> dict[int, list[int]]:
    """Compute the passes of a journal again, over another expert cache."""
    from greenroom.hf.kv.batch import Batch
    from greenroom.server.engine.tokens.sampling import Sampler

    other = Served(folder, **options)
    try:
        generation_config = other.engine.model.generation_config
        samplers = {n: Sampler(r, generation_config, 320) for n, r in journal.requests.items()}
        tokens_by_request = REPLAY(Batch(other.engine.model), journal, samplers)
        return {
            number: [token.id for token in tokens] for number, tokens in tokens_by_request.items()
        }
    finally:
        other.close()


def test_equal_passes_give_equal_bits_over_any_cache(served: Any) -> None:
    folder = cached_tiny("qwen3_moe", tokenizer=True, dtype="bfloat16", hidden_size=64, head_dim=16)
    journal = Journal()
    s = Served(folder, journal=journal, prefill_chunk=16, capacity=5,
               store={"fails": lambda read: read % 41 == 0})  # fmt: skip
    system = draw(50, 99)
    recorders = []
    try:
        for seed, (prompt, new) in enumerate(MIXED * 2):
            ids = [*system, *draw(prompt, seed)] if seed % 2 else draw(prompt, seed)
            sampling = Sampling(temperature=0.8, seed=seed)
            recorders.append(s.ask(ids, new, sampling=sampling, top_logprobs=3))
        for each in recorders:
            assert each.end().reason == "length"
    finally:
        s.close()
    assert any(isinstance(event, PrefixReuse) for event in journal.events)
    replayed = replayed_tokens(folder, journal, capacity=16)
    assert replayed == {number: each.ids for number, each in enumerate(recorders)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_batch_invariant_answers_equal_unbatched_ones(dtype: str) -> None:
    options = {"hidden_size": 64, "head_dim": 16} if dtype == "bfloat16" else {}
    folder = cached_tiny("qwen3_moe", tokenizer=True, dtype=dtype, **options)
    requests = [(draw(prompt, seed), new) for seed, (prompt, new) in enumerate(MIXED)]
    requests += [([*requests[4][0], *draw(5, 77)], 4)]
    s = Served(folder, batch_invariant=True, prefill_chunk=16, capacity=5)
    try:
        assert (s.engine.batch.sequential_reason == "") == (dtype == "bfloat16")
        batched_answers = [s.ask(ids, new, top_logprobs=5) for ids, new in requests[:-1]]
        for each in batched_answers:
            each.end()
        batched_answers.append(s.ask(*requests[-1], top_logprobs=5))
        assert batched_answers[-1].end().reused_tokens == 80  # in whole chunks: 5 of 16
    finally:
        s.close()
    for (ids, new), each in zip(requests, batched_answers, strict=True):
        unbatched = Served(folder, batch_invariant=True, prefill_chunk=16, capacity=16)
        try:
            recorder = unbatched.ask(ids, new, top_logprobs=5)
            recorder.end()
            assert recorder.tokens == each.tokens  # log-probabilities too, to the last bit
        finally:
            unbatched.close()
