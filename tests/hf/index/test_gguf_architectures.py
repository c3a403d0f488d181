"""GGUF files by llama.cpp's own converter: each parameter has the original model's bits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from greenroom.hf.checkpoint.gguf.architectures import SERVED, UNREAD
from greenroom.hf.checkpoint.gguf.header import Header
from greenroom.hf.checkpoint.gguf.metadata import MODELS, makes_config
from greenroom.hf.checkpoint.gguf_file import read_gguf
from greenroom.hf.model.architectures import WRAPPERS
from greenroom.hf.model.reference import (
    load_reference_experts,
    load_reference_model,
    transformers_can_load,
)
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.hf.pack.packing import pack
from tests.gguf_architectures import FOLDER, names, original
from tests.hf.check.test_parity import streamed
from tests.models import OTHERWISE, TYPES, folder_of

PROMPT = torch.arange(3, 15)[None]


def architecture(name: str) -> str:
    """GGUF's name of a file's architecture."""
    return str(read_gguf(FOLDER / name / "model.gguf")[1]["general.architecture"])


# Routed experts, and what reads pictures and sound.
NOT_LOADED = re.compile(r"\.experts\.|^model\.(visual|audio_tower|vision_model|multi_modal_proj)")


@pytest.mark.parametrize("name", names())
@torch.inference_mode()
def test_parameters_and_logits_are_those_of_the_original(name: str) -> None:
    path = FOLDER / name / "model.gguf"
    whole = original(FOLDER / name)
    with streamed(path, capacity=3, kernels="eager") as model:
        assert_same_dense_parts(model, whole)
        logits = model(input_ids=PROMPT, use_cache=False).logits
    if name not in OTHERWISE:
        assert_experts_equal(path, whole)
    wanted = whole(input_ids=PROMPT, use_cache=False).logits
    assert torch.isfinite(wanted).all()
    assert torch.equal(logits, wanted)
    if transformers_can_load(skeleton := ModelSkeleton.of(path)):  # what `verify` compares with
        reference = load_reference_model(skeleton)
        assert torch.equal(reference(input_ids=PROMPT, use_cache=False).logits, wanted)


def assert_same_dense_parts(model: nn.Module, whole: nn.Module) -> None:
    original = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    for key, tensor in (*model.named_parameters(), *model.named_buffers()):
        wanted = original.pop(key)
        assert tensor.dtype == wanted.dtype, key
        assert torch.equal(tensor, wanted), key
    assert not [key for key in original if not NOT_LOADED.search(key)]


def assert_experts_equal(path: Path, whole: nn.Module) -> None:
    skeleton = ModelSkeleton.of(path)
    assert skeleton.layers
    for layer, streamed_parameters in enumerate(skeleton.layers):
        for key, tensor in load_reference_experts(skeleton, layer).items():
            module = streamed_parameters[0].module
            wanted = whole.get_submodule(module).get_parameter(key)
            assert torch.equal(tensor, wanted), f"{module}.{key}"


def test_the_table_has_the_architectures_of_the_files() -> None:
    """And the converter knows none of the others."""
    stored, refused = {}, json.loads((FOLDER / "refused.json").read_text())
    for name in names():
        kind = json.loads((FOLDER / name / "config.json").read_text())["model_type"]
        if folder_of(kind) not in WRAPPERS:
            _, metadata, _ = read_gguf(FOLDER / name / "model.gguf")
            stored[folder_of(kind)] = metadata["general.architecture"]
    assert stored == SERVED
    others = {folder_of(name) for name in TYPES} - {*SERVED, *WRAPPERS}
    assert others == {folder_of(name) for name in refused} - {*SERVED, *WRAPPERS}
    assert others >= {*UNREAD}


def test_the_reference_reads_parameters_from_the_metadata(tmp_path: Path) -> None:
    """Qwen4's factors of n-grams, which float32 cannot hold; a pack has them too."""
    path = FOLDER / "qwen4_exp_text" / "model.gguf"
    whole = original(path.parent).state_dict()
    factors = [key for key in whole if key.endswith("layer_multipliers")]
    assert factors
    assert not any(torch.equal(whole[key].float().long(), whole[key]) for key in factors)
    pack(str(path), tmp_path / "pack", "int8")
    loaded = ModelSkeleton.of(tmp_path / "pack").load().state_dict()
    for model in (load_reference_model(ModelSkeleton.of(path)).state_dict(), loaded):
        assert {*factors} <= {*model}
        for key, tensor in model.items():
            assert tensor.dtype == whole[key].dtype, key
            assert torch.equal(tensor, whole[key]), key


ROPE = {"rope_type": "default", "rope_theta": 1e4}
PART = {"partial_rotary_factor": 0.25}
# Values of published models that the tiny models do not have, and the metadata do not say.
PUBLISHED: dict[str, dict[str, Any]] = {
    "afmoe": {"layer_types": ["sliding_attention"] * 2, "mup_enabled": True},
    "kimi_linear": {"n_group": 1},
    "qwen4_exp_text": {"output_gate_type": "sigmoid", "rope_parameters": {**ROPE, **PART}},
    "step3p7": {
        "rope_parameters": {
            "full_attention": {**ROPE, "partial_rotary_factor": 0.5},
            "sliding_attention": ROPE,
        }
    },
}


@pytest.mark.parametrize("name", [name for name in names() if architecture(name) in MODELS])
@torch.inference_mode()
def test_a_config_made_from_the_metadata_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.symlink_to(FOLDER / name / "model.gguf")
    whole = original(FOLDER / name, **PUBLISHED.get(name, {}))
    with streamed(path, capacity=3, kernels="eager") as model:
        logits = model(input_ids=PROMPT, use_cache=False).logits
    assert torch.equal(logits, whole(input_ids=PROMPT, use_cache=False).logits)


def test_architectures_whose_metadata_make_no_config() -> None:
    for name in names():
        header = Header(*read_gguf(FOLDER / name / "model.gguf"))
        assert makes_config(header) == (header.architecture in MODELS)
    assert {*MODELS} <= {*SERVED.values()}
