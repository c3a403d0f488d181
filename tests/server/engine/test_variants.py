"""Variants of a model answer as their complete checkpoints do, also in one batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from greenroom.server.engine.requests import Sampling
from tests.adapters import make_adapter, merge
from tests.models import cached_tiny
from tests.server.rig import AnswerRecorder, Served, draw

# Of the layers 0 and 2, which have experts; both adapters change expert 3 of layer 0.
MATH = {0: [0, 3, 4], 2: [5]}
LAW = {0: [3], 2: [1, 2]}
PROMPTS = [(40, 9), (5, 12), (17, 6), (33, 10), (1, 8), (9, 11)]


class Models(NamedTuple):
    """A model, its two adapters, and the complete checkpoints of the three variants."""

    folder: Path
    adapters: list[Path]
    complete: list[Path]


def make(folder: Path, to: Path) -> Models:
    adapters = [
        make_adapter(folder, to / name, experts, seed, prefix)
        for name, experts, seed, prefix in (("math", MATH, 1, ""), ("law", LAW, 2, "model."))
    ]
    merged = [merge(folder, each, to / f"{each.name}-complete") for each in adapters[:1]]
    whole = make_adapter(folder, to / "whole", LAW, 2)
    return Models(folder, adapters, [folder, *merged, merge(folder, whole, to / "law-complete")])


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def models(request: Any, tmp_path_factory: Any) -> Models:
    options = {"hidden_size": 64, "head_dim": 16} if request.param == "bfloat16" else {}
    folder = cached_tiny("qwen3_moe", tokenizer=True, dtype=request.param, **options)
    return make(folder, tmp_path_factory.mktemp("variants"))


@pytest.fixture
def engines(no_threads_left: None) -> Iterator[Any]:
    opened: list[Served] = []

    def make(folder: Path, **options: Any) -> Served:
        opened.append(Served(folder, **options))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def ask_all(engine: Served, variants: list[int], **options: Any) -> list[AnswerRecorder]:
    """Ask for answers to all prompts, each by its variant in turn."""
    recorders = [
        engine.ask(
            draw(prompt, seed),
            new,
            variant=variants[seed % len(variants)],
            top_logprobs=5,
            **options,
        )
        for seed, (prompt, new) in enumerate(PROMPTS)
    ]
    for each in recorders:
        assert each.end().reason == "length"
    return recorders


@pytest.mark.parametrize("capacity", [5, 30])
def test_a_mixed_batch_has_the_bits_of_each_variant_alone(
    models: Models, engines: Any, capacity: int
) -> None:
    """With few slots, and with one for each of the 16 experts and the 7 changed ones."""
    options = {"batch_invariant": True, "prefill_chunk": 16}
    mixed = engines(models.folder, adapters=models.adapters, capacity=capacity, **options)
    assert mixed.engine.greenroom.setup.catalog.experts == 16 + 4 + 3
    answers = ask_all(mixed, [0, 1, 2])
    for variant, folder in enumerate(models.complete):
        alone = ask_all(engines(folder, capacity=capacity, **options), [0])
        same = [a.tokens == b.tokens for a, b in zip(answers, alone, strict=True)]
        assert same[variant::3] == [True, True]  # log-probabilities too, to the last bit
        assert not all(same)  # the other variants answer otherwise


def test_the_text_is_that_of_each_variant_alone(models: Models, engines: Any) -> None:
    """Prompts and answers share passes here, with prefetching and drafts of all variants."""
    options = {"prefill_chunk": 16, "setup_options": {"prefetch": "next-gate"}}
    mixed = engines(
        models.folder, adapters=models.adapters, capacity=6, speculate="lookup", **options
    )
    answers = ask_all(mixed, [0, 1, 2])
    counts = mixed.engine.greenroom.stats()
    assert counts.prefetch["began"] > 0
    for variant, folder in enumerate(models.complete):
        alone = ask_all(engines(folder, capacity=6), [0])
        for a, b in list(zip(answers, alone, strict=True))[variant::3]:
            assert a.ids == b.ids
