"""Adapters replace a model's experts, or are refused with one clear line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import greenroom
from greenroom.errors import CheckpointError, GreenroomError, UnsupportedModel, UsageError
from greenroom.hf.check.verify import verify
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.hf.variants.index import Adapters
from tests.adapters import changed_experts, make_adapter, merge, tensors_of
from tests.hf.conftest import one_line, write_raw
from tests.models import cached_tiny

CHANGED = {0: [0, 3], 2: [5]}
IDS = torch.arange(3, 40)[None]
EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def folder() -> Path:
    return cached_tiny("qwen3_moe", tokenizer=True, dtype="bfloat16", hidden_size=64, head_dim=16)


def logits(source: Path, **options: Any) -> torch.Tensor:
    model, _ = greenroom.load(str(source), context=64, prefetch="off", **options)
    try:
        with torch.inference_mode():
            return model(IDS).logits
    finally:
        model.greenroom.detach()


@pytest.mark.parametrize("cache", ["20%", "100%"])
@pytest.mark.parametrize("prefix", ["", "model."])  # ESFT's names lack it
def test_an_adapter_gives_the_bits_of_the_complete_checkpoint(
    folder: Path, tmp_path: Path, cache: str, prefix: str
) -> None:
    adapter = make_adapter(folder, tmp_path / "math", CHANGED, prefix=prefix)
    named = make_adapter(folder, tmp_path / "named", CHANGED)
    complete = merge(folder, named, tmp_path / "complete")
    expected = logits(complete, cache="100%")
    assert torch.equal(logits(folder, cache=cache, adapter=str(adapter)), expected)
    assert not torch.equal(logits(folder, cache=cache), expected)


def test_a_part_of_an_expert_may_be_changed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    save_file({EXPERT: changed_experts(folder, CHANGED)[EXPERT]}, tmp_path / "part/one.safetensors")
    complete = merge(folder, tmp_path / "part", tmp_path / "complete")
    assert torch.equal(logits(folder, adapter=str(tmp_path / "part")), logits(complete))


def test_a_model_with_an_adapter_is_verified_and_materialised(folder: Path, tmp_path: Path) -> None:
    adapter = make_adapter(folder, tmp_path / "math", CHANGED)
    verdict = verify(str(folder), "30%", tokens=2, adapter=str(adapter))
    assert verdict.identical
    assert not verdict.entire_model
    model, _ = greenroom.load(str(folder), context=64, adapter=str(adapter))
    experts = model.greenroom.materialize().model.layers[0].mlp.experts
    _, up = experts.gate_up_proj[3].chunk(2)
    assert torch.equal(up, tensors_of(adapter)[EXPERT])


def test_a_fused_tensor_changes_all_experts_of_its_layer(tmp_path: Path) -> None:
    folder = cached_tiny("gpt_oss")
    names = [name for name in tensors_of(folder) if name.endswith("1.mlp.experts.down_proj")]
    (tmp_path / "one").mkdir()
    changed = {name: tensors_of(folder)[name] * 2 for name in names}
    save_file(changed, tmp_path / "one/adapter.safetensors")
    skeleton = ModelSkeleton.of(folder, adapters=Adapters((str(tmp_path / "one"),), True))
    assert skeleton.variants is not None
    count = skeleton.catalog.experts_per_layer[0]
    assert skeleton.catalog.experts_per_layer == (count, 2 * count, count)
    assert skeleton.variants.changed(1) == [(1, e) for e in range(count)]


def empty(adapter: Path) -> None:
    shutil.rmtree(adapter)
    adapter.mkdir()


def pickled(adapter: Path) -> None:
    empty(adapter)
    (adapter / "adapter.bin").touch()


def without_tensors(adapter: Path) -> None:
    write_raw(adapter / "adapter.safetensors", b"{}")


def write_one(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return lambda adapter: save_file({name: tensor}, adapter / "more.safetensors")


def of_a_router(adapter: Path) -> None:
    write_one("model.layers.0.mlp.gate.weight", torch.zeros(8, 64, dtype=torch.bfloat16))(adapter)


def listing(text: str) -> Callable[[Path], Any]:
    return lambda adapter: (adapter / "expert_cfg.json").write_text(text)


INDEX = {"weight_map": {"a": "adapter.safetensors", "b": "adapter-2.safetensors"}}


@pytest.mark.parametrize(
    ("spoil", "kind", "message"),
    [
        (shutil.rmtree, UsageError, "math: there is no such folder"),
        (empty, UsageError, "math: an adapter needs safetensors files, but the folder has none"),
        (pickled, UsageError, "none (adapter.bin is a pickle file: convert it)"),
        (without_tensors, UsageError, "math: the adapter's files have no tensors"),
        (lambda adapter: write_raw(adapter / "adapter.safetensors", b"{"), CheckpointError,
         "adapter.safetensors: the safetensors header is"),
        (write_one(EXPERT, torch.zeros(24, 64, dtype=torch.bfloat16)), CheckpointError,
         f"the tensor {EXPERT} is in another file, too"),
        (write_one("model.layers.0.mlp.experts.8.up_proj.weight", torch.zeros(2)), CheckpointError,
         "has no tensor model.layers.0.mlp.experts.8.up_proj.weight: the adapter is of another"),
        (write_one(EXPERT.replace(".3.", ".1."), torch.zeros(24, 32, dtype=torch.bfloat16)),
         CheckpointError, "1.up_proj.weight has shape [24, 32], but in the model [24, 64]"),
        (write_one(EXPERT.replace(".3.", ".1."), torch.zeros(24, 64)), CheckpointError,
         "1.up_proj.weight has dtype float32, but in the model bfloat16"),
        (of_a_router, UnsupportedModel,
         "the tensor model.layers.0.mlp.gate.weight belongs to no routed expert"),
        (listing('{"experts": {"0": [0, 3], "2": [5, 6]}}'), CheckpointError,
         "expert_cfg.json lists expert 6 of layer 2, but the adapter has no tensor of it"),
        (listing('{"experts": {"0": 3}}'), CheckpointError, "experts must be lists of numbers"),
        (listing("{}"), CheckpointError, "experts must be lists of numbers by layer"),
        (lambda adapter: (adapter / "model.safetensors.index.json").write_text(json.dumps(INDEX)),
         CheckpointError, "adapter-2.safetensors: this file is missing"),
    ],
)  # fmt: skip
def test_what_is_no_adapter_of_the_model_is_refused(
    folder: Path, tmp_path: Path, spoil: Any, kind: type[GreenroomError], message: str
) -> None:
    adapter = make_adapter(folder, tmp_path / "math", CHANGED)
    spoil(adapter)
    with pytest.raises(kind, match=re.escape(message)) as error:
        ModelSkeleton.of(folder, adapters=Adapters((str(adapter),)))
    assert str(adapter) in one_line(error)


def test_a_listed_adapter_is_read(folder: Path, tmp_path: Path) -> None:
    """As ESFT writes it: two files, and the list of the experts."""
    adapter = make_adapter(folder, tmp_path / "math", {0: [0, 3]})
    save_file(changed_experts(folder, {2: [5]}), adapter / "second.safetensors")
    listing('{"experts": {"0": [0, 3], "2": [5]}, "shared_experts": false}')(adapter)
    skeleton = ModelSkeleton.of(folder, adapters=Adapters((str(adapter),), as_variants=True))
    assert skeleton.variants is not None
    assert skeleton.variants.changed(1) == [(0, 0), (0, 3), (1, 5)]  # MoE layers are 0 and 2


def test_models_that_are_no_safetensors_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    from greenroom.hf.pack.packing import pack
    from tests.gguf_architectures import FOLDER

    adapter = make_adapter(folder, tmp_path / "math", CHANGED)
    pack(str(folder), tmp_path / "pack", "int8")
    for model, what in ((tmp_path / "pack", "pack"), (FOLDER / "qwen3_moe/model.gguf", "GGUF")):
        with pytest.raises(
            UnsupportedModel, match=f"needs the original.* is a {what} model"
        ) as error:
            ModelSkeleton.of(model, adapters=Adapters((str(adapter),)))
        assert one_line(error).startswith(f"{adapter}: ")


def test_one_model_has_one_adapter(folder: Path) -> None:
    from greenroom.config import LoadConfig
    from greenroom.hf.load.load import load_with

    with pytest.raises(UsageError, match="takes one adapter; `greenroom serve` and"):
        load_with(str(folder), LoadConfig(adapter=("one", "two")))
