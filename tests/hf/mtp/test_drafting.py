"""Answers drafted by an MTP layer are those without it, in `run` and in the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.config import LoadConfig, SamplingConfig
from greenroom.core.speculation import speculation
from greenroom.errors import UnsupportedModel
from greenroom.hf.load.load import load_with
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.hf.text.drafting import DraftedLoop
from greenroom.hf.text.generate import answer
from greenroom.server.engine.requests import Sampling
from tests.hf.mtp.checkpoints import LAYERS, edit, mtp_folder
from tests.models import cached_tiny
from tests.server.engine.test_drafts import EagerTimes
from tests.server.rig import Served, draw

EXPERTS, SHARE = 8, 0.001
SAMPLINGS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.6, "seed": 3},
    "cut": {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "seed": 4},
}


def load(folder: Path, mtp: bool = True, **options: Any) -> Any:
    config = LoadConfig(device="cpu", **({"cache": "50%"} | options))
    return load_with(str(folder), config, remember=False, mtp=mtp)


@pytest.fixture(scope="module", params=[1.0, SHARE], ids=["random", "predicts well"])
def ready(request: Any) -> Iterator[Any]:
    """A model with its tokenizer, and the same one without its MTP layer."""
    folder = mtp_folder(request.param)
    both = load(folder), load(folder, mtp=False)
    yield *both, request.param
    for model, _ in both:
        model.greenroom.close()


@pytest.fixture(autouse=True)
def _eager(monkeypatch: Any) -> None:
    monkeypatch.setattr(speculation, "PassTimes", EagerTimes)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_answers_are_those_without_the_layer(ready: Any, name: str) -> None:
    drafted, plain, share = ready
    loop = DraftedLoop(drafted[0])
    assert loop.description == "speculation by an MTP layer"
    loop.speculation.guard.passed = lambda *args: None  # type: ignore[method-assign]
    for prompt in ("The green the", "The green theatre " * 30):  # one is read in two blocks
        sampling = SamplingConfig(max_new_tokens=70, **SAMPLINGS[name])
        options: dict[str, Any] = {"context": 1000, "to_the_end": True}
        one = answer(*drafted, prompt, sampling, **options, loop=loop)
        other = answer(*plain, prompt, sampling, **options)
        assert one.token_ids == other.token_ids
    counts = loop.speculation.counts
    assert counts.drafted > 50
    if share == SHARE and name == "greedy":
        assert counts.accepted > 0.8 * counts.drafted


def test_experts_of_the_layer_are_in_slots_and_counted(ready: Any) -> None:
    drafted, plain, _ = ready
    catalog = drafted[0].greenroom.setup.catalog
    assert catalog.layers[-1] == "mtp_layer.mtp_block.mlp.experts"
    assert catalog.experts == plain[0].greenroom.setup.catalog.experts + EXPERTS
    driver = drafted[0].greenroom.driver
    before = driver.request_counts.copy()
    loop = DraftedLoop(drafted[0])
    answer(*drafted, "The", SamplingConfig(max_new_tokens=9), context=200, loop=loop)
    used = (driver.request_counts - before)[catalog.offsets[-2] :]
    assert used.sum() >= 2 * loop.speculation.counts.drafted > 0  # two experts a token
    assert not list(drafted[0].mtp_layer.mtp_block.mlp.experts.parameters())
    assert "mtp_layer" not in dict(plain[0].named_children())


def test_the_memory_of_the_layer_is_in_the_budget(ready: Any) -> None:
    drafted, plain, _ = ready
    with_layer, without = (each[0].greenroom.setup for each in (drafted, plain))
    assert len(with_layer.keys_values.layers) == len(without.keys_values.layers) + 1
    assert with_layer.fingerprint != without.fingerprint  # routing is remembered apart
    folder = with_layer.source.checkpoint.folder
    one, other = ModelSkeleton.of(folder, mtp=True), ModelSkeleton.of(folder)
    layer = drafted[0].mtp_layer
    tensors = [*layer.parameters(), *layer.buffers()]  # not of routed experts
    assert one.dense_bytes - other.dense_bytes == sum(each.nbytes for each in tensors)


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_the_engine_drafts_for_one_request_at_a_time(name: str, no_threads_left: None) -> None:
    sampling = Sampling(temperature=0.0) if name == "greedy" else Sampling(temperature=0.7, seed=5)
    folder = mtp_folder(SHARE)
    drafted = Served(folder, speculate="mtp", max_batch=1)
    plain = Served(folder, max_batch=1)
    try:
        drafted.engine.drafts.speculation.guard.passed = lambda *args: None
        first = draw(150, 1)
        for prompt in (first, [*first, 7, 8, 9], draw(5, 2)):  # the second reuses keys and values
            one, other = (each.ask(prompt, 40, sampling=sampling) for each in (drafted, plain))
            assert one.end().reason == other.end().reason == "length"
            assert one.tokens == other.tokens
        counts = drafted.engine.drafts.speculation.counts
        assert counts.drafted > 30
        assert counts.accepted > (0.7 if name == "greedy" else 0.05) * counts.drafted
        assert "speculation by an MTP layer" in drafted.engine.summary
    finally:
        drafted.close()
        plain.close()


def test_models_without_an_mtp_layer_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="does not work with Qwen3MoeForCausalLM"):
        load(cached_tiny("qwen3_moe", tokenizer=True))
    with pytest.raises(UnsupportedModel, match=r"no weights of one \(model.layers.3.eh_proj"):
        load(cached_tiny("glm4_moe", tokenizer=True))


def test_a_model_whose_passes_cannot_verify_drafts_is_refused() -> None:
    model, _ = load(mtp_folder(dtype="float32"))
    with pytest.raises(UnsupportedModel, match=r"--speculate mtp: .* is computed token by token"):
        DraftedLoop(model)
    model.greenroom.close()


def test_a_layer_that_fails_is_refused(monkeypatch: Any) -> None:
    model, _ = load(mtp_folder())
    monkeypatch.setattr(model.mtp_layer, "forward", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(UnsupportedModel, match="the MTP layer of Glm4MoeForCausalLM fails"):
        DraftedLoop(model)
    model.greenroom.close()


def test_a_missing_tensor_of_the_layer_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for path in mtp_folder().iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    edit(tmp_path, num_nextn_predict_layers=1)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.layers.{LAYERS}.shared_head.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(Exception, match=r"mtp_layer.post_norm.weight is missing"):
        load(tmp_path)
