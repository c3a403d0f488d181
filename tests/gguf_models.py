"""Tiny GGUF models, written by gguf's own writer and quantiser.

    path = write(tmp_path / "tiny.gguf", "qwen3_moe", {"ffn_down": "Q6_K", "": "Q4_K"})

gguf-py quantises to Q8_0, Q5_0, Q5_1, Q4_0, Q4_1 and MXFP4; the other types, which it can only
expand, are random codes under sane scales. What llama.cpp itself makes of them lies in
tests/data/gguf (`by_llama`).
"""

from __future__ import annotations

import json
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from tests.ggml_blocks import HALVES, LARGE, set_scales
from tests.models import make, save_tokenizer

ARCHITECTURES = {
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
    "qwen2_moe": "qwen2moe",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_moe": "qwen3moe",
}
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "head_dim": 64,
    "mlp_only_layers": [],
}
NAMES = {  # transformers' names inside a layer -> llama.cpp's
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
NAMES |= {  # of linear attention
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
QUANTISED = ("Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "MXFP4", "BF16")  # by gguf-py


def write(
    path: Path, name: str = "qwen3_moe", types: dict[str, str] | None = None, **overrides: Any
) -> Path:
    """A GGUF file of a tiny model.

    types: the type of the matrices whose name contains the key; the first that fits counts.
           Vectors and routers are F32, as llama.cpp has them
    """
    model = make(name, "bfloat16", **{**SIZES, **overrides})
    return write_model(path, model, types or {"": "Q8_0"})


def write_model(path: Path, model: Any, types: dict[str, str]) -> Path:
    """A model of one of ARCHITECTURES as a GGUF file."""
    name = model.config.model_type
    config, arch = model.config, ARCHITECTURES[name]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // 4)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    writer.add_expert_feed_forward_length(width)
    if getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if name == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(
            config.rope_parameters["original_max_position_embeddings"]
        )
    if name == "qwen3_5_moe_text":
        _add_linear_attention(writer, config)
    if name == "glm4_moe":
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        rotary = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
        writer.add_rope_dimension_count(rotary)
    _tokenizer(writer, path.parent, config.vocab_size)
    named = tensors(model)
    for key, tensor in (_qwen35(named, config) if arch == "qwen35moe" else named).items():
        type_name = next((types[part] for part in types if part in key), "F32")
        vector = (
            tensor.ndim == 1 or "ffn_gate_inp" in key or "conv1d" in key or key.endswith(".bias")
        )
        add(writer, key, tensor.float(), Type.F32 if vector else Type[type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(model: Any) -> dict[str, Tensor]:
    """The model's tensors by GGUF's names."""
    named: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name in TOP:
            if name != "lm_head.weight" or not model.config.tie_word_embeddings:
                named[TOP[name]] = tensor
            continue
        _, _, layer, inner = name.split(".", 3)
        stem, _, suffix = inner.rpartition(".")
        oss = model.config.model_type == "gpt_oss"
        after = model.config.model_type in ("gpt_oss", "qwen3_5_moe_text", "glm4_moe")
        if stem == "mlp.experts":
            kind = "bias" if suffix.endswith("_bias") else "weight"
            tensor = tensor.transpose(1, 2) if oss and kind == "weight" else tensor
            if suffix.startswith("gate_up_proj"):
                gate, up = (tensor[:, ::2], tensor[:, 1::2]) if oss else tensor.chunk(2, dim=1)
                named[f"blk.{layer}.ffn_gate_exps.{kind}"] = gate
                named[f"blk.{layer}.ffn_up_exps.{kind}"] = up
            else:
                named[f"blk.{layer}.ffn_down_exps.{kind}"] = tensor
        elif inner == "self_attn.sinks":
            named[f"blk.{layer}.attn_sinks.weight"] = tensor
        elif inner in ("linear_attn.A_log", "linear_attn.dt_bias"):
            named[f"blk.{layer}." + ("ssm_a" if suffix == "A_log" else "ssm_dt.bias")] = tensor
        elif after and stem == "post_attention_layernorm":
            named[f"blk.{layer}.post_attention_norm.weight"] = tensor
        elif suffix == "e_score_correction_bias":
            named[f"blk.{layer}.exp_probs_b.bias"] = tensor
        elif stem in NAMES:
            one = tensor[0] if stem.endswith("shared_expert_gate") else tensor
            named[f"blk.{layer}.{NAMES[stem]}.{suffix}"] = one
        else:
            raise KeyError(name)
    return named


def _qwen35(named: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Convert tensors as llama.cpp does: norms plus one, A as it is, heads in tiles."""
    keys = config.linear_num_key_heads
    per_key = config.linear_num_value_heads // keys
    first = 2 * keys * config.linear_key_head_dim  # rows of queries and keys

    def tiled(rows: Tensor) -> Tensor:
        heads = rows.unflatten(0, (keys, per_key, -1))
        return heads.transpose(0, 1).reshape(rows.shape)

    converted: dict[str, Tensor] = {}
    for name, tensor in named.items():
        if name.endswith("norm.weight") and "ssm_norm" not in name:
            tensor = tensor.float() + 1
        elif name.endswith("ssm_a"):
            tensor = tiled(-tensor.float().exp())
        elif "ssm_conv1d" in name or "attn_qkv" in name:
            rows = tensor.flatten(1)
            tensor = torch.cat([rows[:first], tiled(rows[first:])])
        elif any(part in name for part in ("ssm_alpha", "ssm_beta", "ssm_dt", "attn_gate.")):
            tensor = tiled(tensor)
        elif "ssm_out" in name:
            tensor = tiled(tensor.T).T
        converted[name] = tensor
    return converted


def _add_linear_attention(writer: gguf.GGUFWriter, config: Any) -> None:
    heads, width = config.linear_num_value_heads, config.linear_value_head_dim
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * width)
    writer.add_full_attention_interval(4)
    rotary = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    writer.add_rope_dimension_count(rotary)
    writer.add_rope_dimension_sections([rotary // 4, rotary // 8, rotary // 8, 0])


def add(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: Type) -> None:
    """One tensor in a type."""
    values = tensor.contiguous().numpy()
    if kind in (Type.F32, Type.F16):
        writer.add_tensor(name, values.astype(np.float16 if kind is Type.F16 else np.float32))
        return
    data = gguf.quantize(values, kind) if kind.name in QUANTISED else codes(values.shape, kind)
    writer.add_tensor(name, data, raw_dtype=kind)


def codes(shape: tuple[int, ...], kind: Type) -> np.ndarray:
    """Random codes of a type under scales that make values of about 0.1."""
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(0)
    data = random.integers(0, 256, (*shape[:-1], shape[-1] // block * nbytes), np.uint8)
    name, blocks = kind.name.lower(), data.reshape(-1, nbytes)
    for at in HALVES.get(name, ()):
        scales = random.uniform(0.5, 2, len(blocks)) / LARGE[name]
        set_scales(name, blocks, at, scales)
    return data


DATA = Path(__file__).parent / "data" / "gguf"
SMALL = {
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
NARROW = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 4}  # blocks of 32
# What the experts' gate, up and down of LOW_BITS.gguf are stored in, by layer.
LOW_BITS = (
    ("iq2_xxs", "iq2_xs", "q4_1"),
    ("iq2_s", "iq3_xxs", "q5_1"),
    ("iq3_s", "iq1_s", "iq4_nl"),
    ("iq1_m", "iq4_xs", "q8_0"),
    ("q2_k", "q3_k", "q4_1"),
    ("tq1_0", "tq2_0", "q5_1"),
)
# A file of DATA -> (sizes, llama-quantize's type, options). Its blocks of 256 ask for rows so wide.
LLAMA: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "Q8_0": (NARROW, "Q8_0", []),
    "Q4_0": (NARROW, "Q4_0", []),
    "Q5_0": (NARROW, "Q5_0", []),
    "MXFP4_MOE": (NARROW, "MXFP4_MOE", []),
    "Q4_K_M": ({"num_experts": 2}, "Q4_K_M", []),
    "Q5_K": (
        {"num_experts": 2, "moe_intermediate_size": 32},
        "Q5_K_S",
        ["--tensor-type", "ffn_down_exps=q8_0"],
    ),
    "LOW_BITS": (
        {"num_experts": 2, "moe_intermediate_size": 32, "head_dim": 32, "num_hidden_layers": 6},
        "Q4_0",
        [
            option
            for layer, types in enumerate(LOW_BITS)
            for part, kind in zip(("gate", "up", "down"), types, strict=True)
            for option in ("--tensor-type", f"blk.{layer}.ffn_{part}_exps={kind}")
        ],
    ),
}


def by_llama(tool: str, folder: Path = DATA) -> None:
    """Make the files of DATA anew: `tool` is llama.cpp's llama-quantize."""
    for name, (sizes, kind, options) in LLAMA.items():
        with tempfile.TemporaryDirectory() as temporary:
            sizes = {**SMALL, **sizes}
            plain = write(Path(temporary) / "plain.gguf", "qwen3_moe", {"": "BF16"}, **sizes)
            command = [tool, *options, str(plain), str(folder / f"{name}.gguf"), kind]
            if name == "LOW_BITS":
                weights = _importance(plain, Path(temporary) / "imatrix")
                command[1:1] = ["--imatrix", str(weights)]
            subprocess.run(command, check=True, capture_output=True)


def _importance(model: Path, path: Path) -> Path:
    """An importance matrix of ones, without which llama-quantize refuses the lowest bits."""
    matrices = [t for t in gguf.GGUFReader(model).tensors if len(t.shape) > 1]
    with open(path, "wb") as file:  # the tool's older format
        file.write(struct.pack("<i", len(matrices)))
        for tensor in matrices:
            ones = np.ones(int(tensor.shape[0] * np.prod(tensor.shape[2:])), np.float32)
            name = tensor.name.encode()
            file.write(struct.pack(f"<i{len(name)}sii", len(name), name, 1, ones.size))
            file.write(ones.tobytes())
        file.write(struct.pack("<i", 1))
    return path


def _tokenizer(writer: gguf.GGUFWriter, folder: Path, size: int) -> None:
    """The byte-level BPE of the other tests."""
    save_tokenizer(folder)
    saved = json.loads((folder / "tokenizer.json").read_text())
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / file).unlink(missing_ok=True)
    vocab = sorted(saved["model"]["vocab"].items(), key=lambda item: item[1])
    tokens = [word for word, _ in vocab]
    tokens += [f"<unused{i}>" for i in range(size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 2 else 1 for i in range(size)])
    writer.add_token_merges(
        [m if isinstance(m, str) else " ".join(m) for m in saved["model"]["merges"]]
    )
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
