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


# Latent attention whose rows are blocks of 32: config, and tensors of a layer.
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_head_dim": 40}
SHAPES = {
    "attn_q_b": (160, 16),
    "attn_kv_a_mqa": (40, 32),
    "attn_kv_a_norm": (32,),
    "attn_k_b": (4, 32, 32),
    "attn_v_b": (4, 8, 32),
}


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


def wide(folder: Path, name: str, types: dict[str, str]) -> Path:
    """A converted model with matrices of these types; latent attention has longer rows."""
    random = np.random.default_rng(0)

    def widen(tensors: dict[str, np.ndarray]) -> None:
        for key in tensors:
            if (part := key.removesuffix(".weight").rpartition(".")[2]) in SHAPES:
                tensors[key] = random.normal(0, 0.2, SHAPES[part]).astype(np.float32)

    path = rewritten(folder, name, widen, types)
    config = json.loads((folder / "config.json").read_text())
    config |= LATENT if "kv_lora_rank" in config else {}
    (folder / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("name", "types", "layers", "plain"),
    [
        ("qwen3_next", {"attn_qkv.": "Q8_0", "attn_gate.": "Q5_0"}, (0, 2), []),
        ("qwen3_next", {"attn_qkv.": "BF16", "attn_gate.": "Q5_0"}, (0, 2), [0]),
        ("deepseek_v3", {"attn_v_b.": "Q8_0", "attn_k_b": "Q5_0"}, (0, 1, 2), [0]),
        ("glm4_moe_lite", {"attn_v_b.": "IQ4_NL"}, (0, 1, 2), [0]),
    ],
)
def test_rows_in_parts(
    tmp_path: Path, name: str, types: dict[str, str], layers: tuple[int, ...], plain: list[int]
) -> None:
    """Rows of two types, and keys of latent attention, which are stored transposed."""
    path = wide(tmp_path, name, types)
    module = "linear_attn.in_proj_qkvz" if name == "qwen3_next" else "self_attn.kv_b_proj"
    assert compared(path) == {f"{n}.{module}" for n in layers}
    logits = []
    for stored in (False, True):
        with served(path, stored, kernels="rounded") as model:
            matrix = stored_matrix(model.get_submodule(f"model.layers.{layers[0]}.{module}"))
            assert isinstance(matrix, JoinedMatrix) == stored
            if isinstance(matrix, JoinedMatrix):
                assert [n for n, p in enumerate(matrix.parts) if isinstance(p, Tensor)] == plain
            for tokens in (PROMPT, PROMPT[:, :1], torch.cat([PROMPT] * 3, 1)):
                logits.append(model(input_ids=tokens, use_cache=False).logits)
    for expanded, joined in zip(logits[:3], logits[3:], strict=True):
        assert torch.equal(expanded, joined)


def test_transposed_keys_alone_are_expanded(tmp_path: Path) -> None:
    assert compared(wide(tmp_path, "deepseek_v3", {"attn_k_b.": "Q8_0"})) == set()


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
