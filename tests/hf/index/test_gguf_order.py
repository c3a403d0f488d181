"""Matrices that llama.cpp's converter put in another order stay quantised, and are put back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.kernels.dense.stored import stored_matrix
from tests.gguf_models import write
from tests.hf.index.test_gguf import rewritten
from tests.hf.index.test_gguf_architectures import PROMPT
from tests.hf.model.test_dense import served

DENSE = ("attn_q.", "attn_k.", "attn_qkv.", "attn_gate.", "gate_shexp.", "up_shexp.")


def compared(path: Path) -> set[str]:
    """The layers whose matrix stays quantised; each decodes to the weight that is loaded else."""
    plain = ModelSkeleton.of(path)
    expanded = plain.dense_bytes
    whole = dict(plain.load().named_parameters())
    skeleton = ModelSkeleton.of(path)
    skeleton.keep_dense_encoded()
    saved, stays = 0, set()
    for name, module in skeleton.load().named_modules():
        if (stored := stored_matrix(module)) is not None:
            assert torch.equal(stored.decode(), whole[f"{name}.weight"]), name
            saved += 2 * stored.shape.numel() - stored.nbytes
            stays.add(name.removeprefix("model.layers."))
    assert skeleton.dense_bytes == expanded - saved
    return stays


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("mixtral", {f"{n}.self_attn.{part}_proj" for n in range(3) for part in "qk"}),
        ("granitemoeshared", {
            f"{n}.{part}"
            for n in range(3)
            for part in ("self_attn.q_proj", "self_attn.k_proj", "shared_mlp.input_linear")
        }),
        ("nemotron_h", {"2.mixer.q_proj", "2.mixer.k_proj", "1.mixer.shared_experts.up_proj"}),
        ("qwen3_5_moe", {
            "0.linear_attn.in_proj_qkv", "0.linear_attn.in_proj_z", "1.self_attn.q_proj",
            "1.self_attn.k_proj", "0.mlp.shared_expert.gate_proj", "0.mlp.shared_expert.up_proj",
            "1.mlp.shared_expert.gate_proj", "1.mlp.shared_expert.up_proj",
        }),
        ("qwen3_next", {
            "0.linear_attn.in_proj_qkvz", "2.linear_attn.in_proj_qkvz", "1.self_attn.q_proj",
            "1.self_attn.k_proj",
            *(f"{n}.mlp.shared_expert.{part}_proj" for n in range(3) for part in ("gate", "up")),
        }),
    ],
)  # fmt: skip
def test_moved_rows(tmp_path: Path, name: str, layers: set[str]) -> None:
    path = rewritten(tmp_path, name, types=dict.fromkeys(DENSE, "Q8_0"))
    assert compared(path) == layers


def test_rows_of_two_types_are_expanded(tmp_path: Path) -> None:
    path = rewritten(tmp_path, "qwen3_next", types={"attn_qkv.": "Q8_0", "attn_gate.": "Q5_0"})
    assert compared(path) == set()


@pytest.mark.parametrize(("kind", "stays"), [("Q8_0", True), ("IQ4_NL", True), ("Q5_K", False)])
def test_moved_columns(tmp_path: Path, kind: str, stays: bool) -> None:
    """Heads of 64 columns are whole blocks of 32, but no whole blocks of 256."""
    path = write(
        tmp_path / "tiny.gguf", "qwen3_5_moe_text", {"ssm_out": kind},
        num_hidden_layers=1, linear_key_head_dim=32, linear_value_head_dim=64,
        layer_types=["linear_attention"],
    )  # fmt: skip
    assert compared(path) == ({"0.linear_attn.out_proj"} if stays else set())


def test_the_bits_are_those_of_expanded_rows(tmp_path: Path) -> None:
    path = rewritten(tmp_path, "mixtral", types={"attn_q.": "Q8_0", "attn_k.": "Q5_0"})
    logits = []
    for stored in (False, True):
        with served(path, stored, kernels="rounded") as model:
            assert (model.model.layers[0].self_attn.k_proj.weight is None) == stored
            logits.append(model(input_ids=PROMPT, use_cache=False).logits)
            logits.append(model(input_ids=PROMPT[:, :1], use_cache=False).logits)
    assert torch.equal(logits[0], logits[2])
    assert torch.equal(logits[1], logits[3])
