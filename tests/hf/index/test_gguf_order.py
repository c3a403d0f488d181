"""Matrices that llama.cpp's converter put in another order stay quantised, and are put back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.kernels.dense.stored import JoinedMatrix, stored_matrix
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


@pytest.mark.parametrize(("kind", "plain"), [("Q8_0", []), ("BF16", [0])])
def test_rows_of_two_types_are_in_parts(tmp_path: Path, kind: str, plain: list[int]) -> None:
    path = rewritten(tmp_path, "qwen3_next", types={"attn_qkv.": kind, "attn_gate.": "Q5_0"})
    module = "linear_attn.in_proj_qkvz"
    assert compared(path) == {f"{n}.{module}" for n in (0, 2)}
    logits = []
    for stored in (False, True):
        with served(path, stored, kernels="rounded") as model:
            matrix = stored_matrix(model.get_submodule(f"model.layers.0.{module}"))
            assert isinstance(matrix, JoinedMatrix) == stored
            if isinstance(matrix, JoinedMatrix):
                assert [n for n, p in enumerate(matrix.parts) if isinstance(p, Tensor)] == plain
            for tokens in (PROMPT, PROMPT[:, :1], torch.cat([PROMPT] * 3, 1)):
                logits.append(model(input_ids=tokens, use_cache=False).logits)
    for expanded, joined in zip(logits[:3], logits[3:], strict=True):
        assert torch.equal(expanded, joined)


def test_up_projections_of_latent_attention_are_dequantised(tmp_path: Path) -> None:
    """Their inputs are cached, so a token multiplies those of its whole context."""
    random = np.random.default_rng(0)
    shapes = {"attn_q_b": (160, 16), "attn_kv_a_mqa": (40, 32), "attn_kv_a_norm": (32,),
              "attn_k_b": (4, 32, 32), "attn_v_b": (4, 8, 32)}  # fmt: skip

    def widen(tensors: dict[str, np.ndarray]) -> None:
        """Make rows of whole blocks of 32."""
        for key in tensors:
            if (part := key.removesuffix(".weight").rpartition(".")[2]) in shapes:
                tensors[key] = random.normal(0, 0.2, shapes[part]).astype(np.float32)

    types = dict.fromkeys(("attn_k_b.", "attn_v_b.", "attn_kv_a_mqa."), "Q8_0")
    path = rewritten(tmp_path, "deepseek_v3", widen, types)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_head_dim": 40}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert compared(path) == {f"{n}.self_attn.kv_a_proj_with_mqa" for n in range(3)}


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
