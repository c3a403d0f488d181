"""Checkpoints of random weights in a real model's shape, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from shapes import Shape

COMPLETE = "complete"  # a file that is written last


def make_checkpoint(folder: Path, shape: Shape, layers: int) -> Path:
    """The checkpoint in this folder; written if it does not exist."""
    if not (folder / COMPLETE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint(folder, shape, layers)
        (folder / COMPLETE).touch()
    return folder


def checkpoint(folder: Path, shape: Shape, layers: int) -> Path:
    """Write a checkpoint of random weights; all layers have the same, which no time depends on."""
    config = {
        "architectures": [shape.architecture], "model_type": shape.family,
        "hidden_size": shape.hidden, "num_hidden_layers": layers, "vocab_size": shape.vocabulary,
        "num_attention_heads": shape.heads[0], "num_key_value_heads": shape.heads[1],
        "head_dim": shape.head_dim, "intermediate_size": shape.inner,
        "moe_intermediate_size": shape.inner, "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k, "norm_topk_prob": False, "dtype": "bfloat16",
        "tie_word_embeddings": False, "max_position_embeddings": 4096, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))

    def random(*size: int) -> torch.Tensor:
        return torch.empty(*size, dtype=torch.bfloat16).uniform_(-0.03, 0.03)

    wide, narrow = (n * shape.head_dim for n in shape.heads)
    norm = shape.head_dim if shape.family == "qwen3_moe" else wide
    layer = {
        "self_attn.q_proj": random(wide, shape.hidden),
        "self_attn.o_proj": random(shape.hidden, wide),
        "self_attn.k_proj": random(narrow, shape.hidden),
        "self_attn.v_proj": random(narrow, shape.hidden),
        "self_attn.q_norm": random(norm), "mlp.gate": random(shape.experts, shape.hidden),
        "self_attn.k_norm": random(shape.head_dim if shape.family == "qwen3_moe" else narrow),
        "input_layernorm": random(shape.hidden), "post_attention_layernorm": random(shape.hidden),
    }  # fmt: skip
    for expert in range(shape.experts):
        layer[f"mlp.experts.{expert}.gate_proj"] = random(shape.inner, shape.hidden)
        layer[f"mlp.experts.{expert}.up_proj"] = random(shape.inner, shape.hidden)
        layer[f"mlp.experts.{expert}.down_proj"] = random(shape.hidden, shape.inner)
    files = {}
    for number in range(layers):
        named = {f"model.layers.{number}.{name}.weight": t for name, t in layer.items()}
        save_file(named, folder / f"layer-{number}.safetensors")
        files |= dict.fromkeys(named, f"layer-{number}.safetensors")
    rest_tensors = {
        "model.embed_tokens.weight": random(shape.vocabulary, shape.hidden),
        "lm_head.weight": random(shape.vocabulary, shape.hidden),
        "model.norm.weight": random(shape.hidden),
    }
    save_file(rest_tensors, folder / "rest.safetensors")
    files |= dict.fromkeys(rest_tensors, "rest.safetensors")
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
