"""The same bits, whatever the cache held and whoever else was there."""

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


def replayed(folder: Any, journal: Journal, **options: Any) -> dict[int, list[int]]:
    """The tokens of a journal's requests in the same passes, over another cache of experts."""
    from greenroom.hf.kv.batch import Batch
    from greenroom.server.engine.tokens.sampling import Sampler

    other = Served(folder, **options)
    try:
        own = other.engine.model.generation_config
        samplers = {n: Sampler(r, own, 320) for n, r in journal.requests.items()}
        found = REPLAY(Batch(other.engine.model), journal, samplers)
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
    assert any(isinstance(event, PrefixReuse) for event in journal.events)
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
        assert (s.engine.batch.sequential_reason == "") == (dtype == "bfloat16")
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
