"""Variants of a model answer as their complete checkpoints do, also in one batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import save_file

from greenroom.server.engine.journal import Journal, Pass
from tests.adapters import Experts, make_adapter, merge, tensors_of
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


def make(folder: Path, to: Path, *experts: Experts) -> Models:
    adapters = [
        make_adapter(folder, to / f"adapter-{seed}", each, seed)
        for seed, each in enumerate(experts, 1)
    ]
    merged = [merge(folder, each, to / f"{each.name}-complete") for each in adapters]
    return Models(folder, adapters, [folder, *merged])


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def models(request: Any, tmp_path_factory: Any) -> Models:
    """With four experts a token: the sum of two would not depend on their order."""
    options: dict[str, Any] = {"dtype": request.param, "num_experts_per_tok": 4}
    if request.param == "bfloat16":
        options |= {"hidden_size": 64, "head_dim": 16}
    folder = cached_tiny("qwen3_moe", tokenizer=True, **options)
    return make(folder, tmp_path_factory.mktemp("variants"), MATH, LAW)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: Any) -> Models:
    """In float32, where passes of other sizes do not change a token."""
    folder = cached_tiny("qwen3_moe", tokenizer=True)
    return make(folder, tmp_path_factory.mktemp("exact"), MATH, LAW)


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


def mixed_passes(journal: Journal) -> int:
    """Count the passes that computed tokens of several variants."""
    passes = [event for event in journal.events if isinstance(event, Pass)]
    variants = [{journal.requests[n].variant for n, _, _ in each.shares} for each in passes]
    return sum(len(each) > 1 for each in variants)


@pytest.mark.parametrize("capacity", [5, 30])
@pytest.mark.parametrize("setup", [{}, {"kernels": "eager", "fake": True}], ids=["cpu", "fake"])
def test_a_mixed_batch_has_the_bits_of_each_variant_alone(
    models: Models, engines: Any, capacity: int, setup: dict[str, Any]
) -> None:
    """With few slots, and with one for each of the 16 experts and the 7 changed ones."""
    options = {
        "batch_invariant": True, "prefill_chunk": 16, "capacity": capacity, "setup_options": setup,
    }  # fmt: skip
    mixed = engines(
        models.folder, adapters=models.adapters, journal=(journal := Journal()), **options
    )
    assert mixed.engine.greenroom.setup.catalog.experts == 16 + 4 + 3
    answers = ask_all(mixed, [0, 1, 2])
    assert (mixed_passes(journal) > 0) == (mixed.engine.batch.sequential_reason == "")
    for variant, folder in enumerate(models.complete):
        alone = ask_all(engines(folder, **options), [0])
        same = [a.tokens == b.tokens for a, b in zip(answers, alone, strict=True)]
        assert same[variant::3] == [True, True]  # log-probabilities too, to the last bit
        assert not all(same)  # the other variants answer otherwise


@pytest.mark.parametrize(
    "setup",
    [
        {"prefetch": "next-gate"},
        {"prefetch": "markov", "policy": "moe-infinity", "scope": "per-layer"},
        {"prefetch": "eamc", "predict_in": "worker", "guard": False},
    ],
    ids=lambda setup: setup["prefetch"],
)
def test_the_text_is_that_of_each_variant_alone(
    exact: Models, engines: Any, setup: dict[str, Any]
) -> None:
    """Prompts and answers share passes here; drafts come from the answers of all variants."""
    options = {"prefill_chunk": 16, "capacity": 6, "speculate": "lookup"}
    mixed = engines(
        exact.folder, adapters=exact.adapters, journal=(journal := Journal()),
        setup_options=setup, **options,
    )  # fmt: skip
    answers = ask_all(mixed, [0, 1, 2])
    assert mixed_passes(journal) > 0
    assert mixed.engine.greenroom.stats().prefetch["began"] > 0
    for variant, folder in enumerate(exact.complete):
        alone = ask_all(engines(folder, **options), [0])
        for a, b in list(zip(answers, alone, strict=True))[variant::3]:
            assert a.ids == b.ids


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral", "glm4_moe"])
def test_other_architectures_have_variants(name: str, engines: Any, tmp_path: Path) -> None:
    """Shared experts, latent attention, routers that are asked early."""
    models = make(cached_tiny(name, tokenizer=True), tmp_path, {1: [0, 2, 3]}, {1: [2, 7]})
    options = {"capacity": 6, "prefill_chunk": 16, "batch_invariant": True}
    mixed = ask_all(engines(models.folder, adapters=models.adapters, **options), [0, 1, 2])
    for variant, folder in enumerate(models.complete):
        alone = ask_all(engines(folder, **options), [0])
        for a, b in list(zip(mixed, alone, strict=True))[variant::3]:
            assert a.tokens == b.tokens


def test_experts_with_biases_keep_those_of_the_model(engines: Any, tmp_path: Path) -> None:
    folder, name = cached_tiny("gpt_oss", tokenizer=True), "model.layers.1.mlp.experts.down_proj"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file({name: 2 * tensors_of(folder)[name]}, adapter / "adapter.safetensors")
    complete = merge(folder, adapter, tmp_path / "complete")
    options = {"capacity": 6, "prefill_chunk": 16, "batch_invariant": True}
    mixed = ask_all(engines(folder, adapters=[adapter], **options), [0, 1])
    for variant, each in enumerate((folder, complete)):
        alone = ask_all(engines(each, **options), [0])
        assert [a.tokens for a in mixed[variant::2]] == [b.tokens for b in alone[variant::2]]


def test_variants_share_no_prefix(exact: Models, engines: Any) -> None:
    engine = engines(exact.folder, adapters=exact.adapters)
    ids = draw(60, 5)
    reused = [engine.ask(ids, 4, variant=n).end().reused_tokens for n in (0, 1, 2, 1, 0, 2)]
    assert reused == [0, 0, 0, 59, 59, 59]
    together = [engine.ask(draw(90, 6), 4, variant=n) for n in (0, 1, 1, 2)]
    reused = [each.end().reused_tokens for each in together]
    assert reused[:2] + reused[3:] == [0, 0, 0]
    assert reused[2] == 89  # it has waited for the prompt of its own variant


def test_variants_share_no_prompt_on_disk(exact: Models, engines: Any, tmp_path: Path) -> None:
    options = {"adapters": exact.adapters, "prompt_cache": str(tmp_path / "prompts")}
    ids = draw(150, 7)
    first = engines(exact.folder, **options)
    expected = [first.ask(ids, 4, variant=n) for n in (0, 1)]
    assert [each.end().reused_tokens for each in expected] == [0, 0]
    first.close()
    again = engines(exact.folder, **options)
    answers = [again.ask(ids, 4, variant=n) for n in (0, 1, 2)]
    assert [each.end().reused_tokens for each in answers] == [149, 149, 0]
    assert [each.ids for each in answers[:2]] == [each.ids for each in expected]
