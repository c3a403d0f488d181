"""`materialize`: the model that transformers loads, from every kind of checkpoint."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import greenroom
from greenroom.errors import (
    BudgetError,
    CheckpointChanged,
    ClosedError,
    UnsupportedCall,
    UnsupportedModel,
)
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.model.reference import load_reference_model
from greenroom.hf.model.skeleton import ModelSkeleton
from tests.gguf_models import write
from tests.hf.conftest import one_line
from tests.models import cached_tiny, reference, tiny
from tests.quantised import fp8

PROMPT = torch.tensor([[5, 6, 7, 8]])
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def loaded(folder: Path, **options: Any) -> Any:
    options.setdefault("cache", "25%")
    return greenroom.load(str(folder), **options)[0]


def same(model: Any, whole: Any) -> None:
    """Equal in every parameter and in what is generated."""
    mine = model.state_dict()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(mine[name], tensor), name
    assert len(mine) == len(whole.state_dict())
    assert torch.equal(model.generate(PROMPT, **GREEDY), whole.generate(PROMPT, **GREEDY))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_it_is_what_transformers_loads_and_can_be_saved(name: str, tmp_path: Path) -> None:
    folder = cached_tiny(name, tokenizer=True)
    whole = AutoModelForCausalLM.from_pretrained(folder)
    model = loaded(folder)
    cache = model.greenroom
    assert cache.materialize() is model
    assert not hasattr(model, "greenroom")
    same(model, whole)
    assert model.num_parameters(only_trainable=True) == whole.num_parameters(only_trainable=True)
    model.save_pretrained(tmp_path)
    saved = ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(each.name for each in tmp_path.iterdir()) == saved
    settings = "generation_config.json"
    assert (tmp_path / settings).read_text() == (folder / settings).read_text()
    same(AutoModelForCausalLM.from_pretrained(tmp_path), whole)
    for each in (model, whole):
        each.train()
        each(PROMPT, labels=PROMPT).loss.backward()
    mine, theirs = dict(model.named_parameters()), dict(whole.named_parameters())
    for each, parameter in theirs.items():  # weights lie at other addresses: last bits differ
        assert torch.allclose(mine[each].grad, parameter.grad, atol=1e-5), each
    half = model.half()
    assert half is model
    assert half(PROMPT).logits.dtype is torch.float16
    with pytest.raises(UnsupportedCall):
        cache.materialize()


def test_what_is_quantised_is_expanded(tmp_path: Path) -> None:
    folder = fp8(tmp_path / "fp8", tokenizer=True)
    model = loaded(folder)
    assert sum(m.weight is None for m in model.modules() if isinstance(m, torch.nn.Linear)) >= 3
    model.greenroom.materialize()
    same(model, load_reference_model(ModelSkeleton.of(folder)))


def test_a_gguf_file_becomes_a_checkpoint_of_transformers(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", "qwen3_moe", {"": "Q8_0"})
    model = loaded(path)
    model.greenroom.materialize()
    whole = load_reference_model(ModelSkeleton.of(path))
    same(model, whole)
    model.save_pretrained(tmp_path / "saved")
    same(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), whole)


def test_the_python_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "python.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "docs/python.md", "exec"), names)
    text, ratio = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert "Once upon a time" in text
    assert 0 < float(ratio) < 1
    names["model"].greenroom.detach()


def test_after_detach_it_generates_again() -> None:
    folder = cached_tiny("mixtral", tokenizer=True)
    model = loaded(folder)
    model.greenroom.detach()
    with pytest.raises(ClosedError, match=r"materialize\(\)"):
        model(PROMPT)
    model.greenroom.materialize()
    same(model, AutoModelForCausalLM.from_pretrained(folder))


def test_where_memory_does_not_suffice_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cached_tiny("mixtral", tokenizer=True)
    model = loaded(folder, kernels="eager")
    monkeypatch.setattr("greenroom.hf.attach.materialize.available_bytes", lambda: 1 << 10)
    with pytest.raises(BudgetError, match="materialize: all experts need") as caught:
        model.greenroom.materialize()
    assert one_line(caught)
    assert torch.equal(
        model.generate(PROMPT, **GREEDY), reference(folder).generate(PROMPT, **GREEDY)
    )
    model.greenroom.detach()


def test_another_checkpoint_under_the_name_is_not_mixed_in(tmp_path: Path) -> None:
    folder = tiny("mixtral", tmp_path / "model", shards=1, tokenizer=True)
    model = loaded(folder, kernels="eager")
    file = folder / "model.safetensors"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    with pytest.raises(CheckpointChanged, match="changed since the model was loaded"):
        model.greenroom.materialize()
    model.greenroom.detach()


def test_a_file_that_changes_while_a_model_is_loaded_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny("mixtral", tmp_path / "model", shards=1, tokenizer=True)
    file = folder / "model.safetensors"

    def changing(cache: Greenroom) -> None:
        os.utime(file, ns=(0, 0))

    monkeypatch.setattr(Greenroom, "warm_up", changing)
    with pytest.raises(CheckpointChanged, match="changed while it was loaded"):
        loaded(folder, kernels="eager")


def test_a_file_that_changes_ends_the_answer_and_all_after_it(tmp_path: Path) -> None:
    folder = tiny("mixtral", tmp_path / "model", shards=1, tokenizer=True)
    model = loaded(folder, kernels="eager", cache="20%")
    model.generate(PROMPT, **GREEDY)
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    for _ in range(2):
        with pytest.raises(CheckpointChanged, match="changed while it was in use") as caught:
            model.generate(PROMPT, **GREEDY)
        assert one_line(caught)
    model.greenroom.detach()


def test_what_has_no_form_of_transformers_or_no_checkpoint_is_refused() -> None:
    model = loaded(cached_tiny("dbrx", tokenizer=True), kernels="eager")
    with pytest.raises(UnsupportedModel, match="cannot be materialised: Greenroom replaced"):
        model.greenroom.materialize()
    model.greenroom.detach()
    skeleton = ModelSkeleton.of(cached_tiny("mixtral"))
    model = skeleton.load()
    model.greenroom = Greenroom(model, ModelSetup(skeleton.catalog, 4, kernels="eager"))
    with pytest.raises(UnsupportedCall, match="checkpoint of this model is not known"):
        model.greenroom.materialize()
    model.greenroom.detach()
