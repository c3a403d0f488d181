"""The published models whose shapes shapes.py writes: sizes, tensors, GGUF metadata.

A *family* is an architecture: its config, the names of its tensors in safetensors and in GGUF, and
its GGUF metadata. A *shape* is a family with the sizes of one model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One tensor: its names in safetensors and in GGUF ("" where it has none), shape and role.

    role: norm, bias, router, embedding, head; matrix; output (a matrix that writes to the residual
    stream). With `experts`, GGUF stacks that many matrices of `shape`; the safetensors name has
    {expert} for their number.
    """

    hf: str
    gguf: str
    shape: tuple[int, ...]
    role: str
    experts: int = 0


@dataclass(frozen=True)
class Family:
    """An architecture: its GGUF name and pre-tokenizer, the tensors of a layer, its metadata."""

    gguf: str
    pre_tokenizer: str
    layer: Callable[[Config, int], Iterator[Entry]]
    metadata: Callable[[Config], dict[str, Any]]
    experts: str  # the config's name for the number of experts of a layer


@dataclass(frozen=True)
class Shape:
    """A published model: its family and config. `recipe` is the GGUF type of its matrices."""

    family: str
    recipe: str
    config: Config

    def of_layers(self, layers: int | None) -> Config:
        """The config with that many layers."""
        config = dict(self.config)
        config["num_hidden_layers"] = layers or config["num_hidden_layers"]
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
        return config


def entries(shape: Shape, config: Config) -> list[Entry]:
    """All tensors of a model, in file order."""
    size = (config["vocab_size"], config["hidden_size"])
    found = [
        Entry("model.embed_tokens.weight", "token_embd.weight", size, "embedding"),
        Entry("model.norm.weight", "output_norm.weight", size[1:], "norm"),
        Entry("lm_head.weight", "output.weight", size, "head"),
    ]
    for layer in range(config["num_hidden_layers"]):
        hf, block = f"model.layers.{layer}.", f"blk.{layer}."
        found += [
            Entry(e.hf and hf + e.hf, e.gguf and block + e.gguf, e.shape, e.role, e.experts)
            for e in FAMILIES[shape.family].layer(config, layer)
        ]
    return found


def _norms(c: Config, post: str = "ffn_norm") -> Iterator[Entry]:
    yield Entry("input_layernorm.weight", "attn_norm.weight", (c["hidden_size"],), "norm")
    yield Entry("post_attention_layernorm.weight", f"{post}.weight", (c["hidden_size"],), "norm")


def _attention(c: Config, biases: str = "") -> Iterator[Entry]:
    """Grouped-query attention; `biases` are the letters of the projections that have one."""
    hidden, head = c["hidden_size"], c["head_dim"]
    wide, narrow = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    for letter, rows in (("q", wide), ("k", narrow), ("v", narrow)):
        yield Entry(f"self_attn.{letter}_proj.weight", f"attn_{letter}.weight", (rows, hidden),
                    "matrix")  # fmt: skip
        if letter in biases:
            yield Entry(f"self_attn.{letter}_proj.bias", f"attn_{letter}.bias", (rows,), "bias")
    yield Entry("self_attn.o_proj.weight", "attn_output.weight", (hidden, wide), "output")
    if "o" in biases:
        yield Entry("self_attn.o_proj.bias", "attn_output.bias", (hidden,), "bias")


def _mlp(c: Config, width: int, hf: str, suffix: str = "", experts: int = 0) -> Iterator[Entry]:
    """Gate, up and down matrices of a dense or shared expert, or of all routed experts."""
    for part, other in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        size = (width, c["hidden_size"])
        name = f"{hf}{other if c['model_type'] == 'mixtral' else f'{part}_proj'}.weight"
        yield Entry(name, f"ffn_{part}{suffix}.weight", size[::-1] if part == "down" else size,
                    "output" if part == "down" else "matrix", experts)  # fmt: skip


def _router(c: Config, experts: int, hf: str = "mlp.gate.weight") -> Entry:
    return Entry(hf, "ffn_gate_inp.weight", (experts, c["hidden_size"]), "router")


def _qwen3(c: Config, layer: int) -> Iterator[Entry]:
    yield from _norms(c)
    yield from _attention(c)
    for letter in "qk":
        yield Entry(f"self_attn.{letter}_norm.weight", f"attn_{letter}_norm.weight",
                    (c["head_dim"],), "norm")  # fmt: skip
    yield _router(c, n := c["num_experts"])
    yield from _mlp(c, c["moe_intermediate_size"], "mlp.experts.{expert}.", "_exps", n)


def _mixtral(c: Config, layer: int) -> Iterator[Entry]:
    yield from _norms(c)
    yield from _attention(c)
    yield _router(c, n := c["num_local_experts"], "block_sparse_moe.gate.weight")
    yield from _mlp(c, c["intermediate_size"], "block_sparse_moe.experts.{expert}.", "_exps", n)


def _gpt_oss(c: Config, layer: int) -> Iterator[Entry]:
    """The experts' stored names differ between formats: shapes.py spells those of safetensors."""
    yield from _norms(c, "post_attention_norm")
    yield from _attention(c, "qkvo")
    yield Entry("self_attn.sinks", "attn_sinks.weight", (c["num_attention_heads"],), "bias")
    n, hidden, width = c["num_local_experts"], c["hidden_size"], c["intermediate_size"]
    yield _router(c, n, "mlp.router.weight")
    yield Entry("mlp.router.bias", "ffn_gate_inp.bias", (n,), "bias")
    yield Entry("mlp.experts.gate_up_proj", "", (2 * width, hidden), "matrix", n)
    yield Entry("mlp.experts.down_proj", "ffn_down_exps.weight", (hidden, width), "output", n)
    for part in ("gate", "up"):
        yield Entry("", f"ffn_{part}_exps.weight", (width, hidden), "matrix", n)
        yield Entry("", f"ffn_{part}_exps.bias", (n, width), "bias")
    yield Entry("mlp.experts.gate_up_proj_bias", "", (n, 2 * width), "bias")
    yield Entry("mlp.experts.down_proj_bias", "ffn_down_exps.bias", (n, hidden), "bias")


def _routed_and_shared(c: Config, layer: int) -> Iterator[Entry]:
    """The MLP of DeepSeek and GLM: dense first layers, then routed and shared experts."""
    if layer < c["first_k_dense_replace"]:
        yield from _mlp(c, c["intermediate_size"], "mlp.")
        return
    n, width = c["n_routed_experts"], c["moe_intermediate_size"]
    yield _router(c, n)
    if c["model_type"] != "deepseek_v2":
        yield Entry("mlp.gate.e_score_correction_bias", "exp_probs_b.bias", (n,), "bias")
    yield from _mlp(c, width, "mlp.experts.{expert}.", "_exps", n)
    yield from _mlp(c, width * c["n_shared_experts"], "mlp.shared_experts.", "_shexp")


def _glm4(c: Config, layer: int) -> Iterator[Entry]:
    yield from _norms(c, "post_attention_norm")
    yield from _attention(c, "qkv")
    yield from _routed_and_shared(c, layer)


def _deepseek(c: Config, layer: int) -> Iterator[Entry]:
    """Latent attention; llama.cpp stores the key and value halves of kv_b_proj separately."""
    yield from _norms(c)
    hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    wide, at = heads * (nope + rope), "self_attn."
    if q := c["q_lora_rank"]:
        yield Entry(at + "q_a_proj.weight", "attn_q_a.weight", (q, hidden), "matrix")
        yield Entry(at + "q_a_layernorm.weight", "attn_q_a_norm.weight", (q,), "norm")
        yield Entry(at + "q_b_proj.weight", "attn_q_b.weight", (wide, q), "matrix")
    else:
        yield Entry(at + "q_proj.weight", "attn_q.weight", (wide, hidden), "matrix")
    yield Entry(at + "kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight", (rank + rope, hidden),
                "matrix")  # fmt: skip
    yield Entry(at + "kv_a_layernorm.weight", "attn_kv_a_norm.weight", (rank,), "norm")
    yield Entry(at + "kv_b_proj.weight", "", (heads * (nope + value), rank), "matrix")
    yield Entry("", "attn_k_b.weight", (heads, rank, nope), "matrix")
    yield Entry("", "attn_v_b.weight", (heads, value, rank), "matrix")
    yield Entry(at + "o_proj.weight", "attn_output.weight", (hidden, heads * value), "output")
    yield from _routed_and_shared(c, layer)


def _common(c: Config) -> dict[str, Any]:
    """Metadata that every architecture has; keys without the architecture's prefix."""
    return {
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "block_count": c["num_hidden_layers"],
        "feed_forward_length": c["intermediate_size"],
        "vocab_size": c["vocab_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(c["rms_norm_eps"]),
        "rope.freq_base": float(c["rope_theta"]),
        "expert_used_count": c["num_experts_per_tok"],
        "expert_count": next(c[f.experts] for f in FAMILIES.values() if f.experts in c),
    }


def _grouped(c: Config) -> dict[str, Any]:
    head = c["head_dim"]
    width = c.get("moe_intermediate_size", c["intermediate_size"])
    return _common(c) | {
        "attention.key_length": head,
        "attention.value_length": head,
        "expert_feed_forward_length": width,
    }


def _of_mixtral(c: Config) -> dict[str, Any]:
    values = _grouped(c) | {"rope.dimension_count": c["head_dim"]}
    del values["expert_feed_forward_length"]
    return values


def _yarn(factor: float, tokens: int) -> dict[str, Any]:
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": tokens,
    }


def _of_gpt_oss(c: Config) -> dict[str, Any]:
    return _grouped(c) | _yarn(32.0, 4096) | {"attention.sliding_window": c["sliding_window"]}


def _shared(c: Config) -> dict[str, Any]:
    sigmoid = c["model_type"] != "deepseek_v2"
    return {
        "leading_dense_block_count": c["first_k_dense_replace"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_shared_count": c["n_shared_experts"],
        "expert_weights_scale": float(c["routed_scaling_factor"]),
        "expert_weights_norm": c["norm_topk_prob"],
        "expert_gating_func": 2 if sigmoid else 1,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
    }


def _of_glm4(c: Config) -> dict[str, Any]:
    return _grouped(c) | _shared(c) | {"rope.dimension_count": c["head_dim"] // 2}


def _of_deepseek(c: Config) -> dict[str, Any]:
    rank, rope, nope = c["kv_lora_rank"], c["qk_rope_head_dim"], c["qk_nope_head_dim"]
    values = _common(c) | _shared(c)
    values |= {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": nope + rope,
        "attention.value_length_mla": c["v_head_dim"],
        "rope.dimension_count": rope,
    }
    if c["q_lora_rank"]:
        values["attention.q_lora_rank"] = c["q_lora_rank"]
    if (scaling := c["rope_scaling"]) is not None:
        values |= _yarn(float(scaling["factor"]), scaling["original_max_position_embeddings"])
        values["rope.scaling.yarn_log_multiplier"] = 0.1 * scaling["mscale_all_dim"]
    return values


FAMILIES = {
    "qwen3moe": Family("qwen3moe", "qwen2", _qwen3, _grouped, "num_experts"),
    "mixtral": Family("llama", "default", _mixtral, _of_mixtral, "num_local_experts"),
    "gpt-oss": Family("gpt-oss", "gpt-4o", _gpt_oss, _of_gpt_oss, "num_local_experts"),
    "glm4moe": Family("glm4moe", "glm4", _glm4, _of_glm4, "n_routed_experts"),
    "deepseek2": Family("deepseek2", "deepseek-llm", _deepseek, _of_deepseek, "n_routed_experts"),
}  # fmt: skip


def _config(class_name: str, model_type: str, sizes: str, **more: Any) -> Config:
    """A config; `sizes` are vocabulary, hidden, layers, heads, kv heads, width, experts a token."""
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "intermediate_size", "num_experts_per_tok")  # fmt: skip
    return {
        "architectures": [class_name],
        "model_type": model_type,
        **dict(zip(names, map(int, sizes.split()), strict=True)),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "dtype": "bfloat16",
        **more,
    }


def _gpt_oss_shape(layers: int, experts: int) -> Shape:
    scaling = {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 4096,
    }  # fmt: skip
    config = _config(
        "GptOssForCausalLM", "gpt_oss", f"201088 2880 {layers} 64 8 2880 4", head_dim=64,
        num_local_experts=experts, sliding_window=128, rope_theta=150_000.0, rms_norm_eps=1e-5,
        max_position_embeddings=131_072, attention_bias=True, rope_scaling=scaling,
        swiglu_limit=7.0,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
            "lm_head"]},
    )  # fmt: skip
    return Shape("gpt-oss", "MXFP4", config)


def _deepseek_yarn(factor: int, mscale: float) -> Config:
    return {
        "type": "yarn", "rope_type": "yarn", "factor": factor, "beta_fast": 32, "beta_slow": 1,
        "mscale": mscale, "mscale_all_dim": mscale, "original_max_position_embeddings": 4096,
    }  # fmt: skip


SHAPES = {
    "qwen3-30b-a3b": Shape("qwen3moe", "Q4_K", _config(
        "Qwen3MoeForCausalLM", "qwen3_moe", "151936 2048 48 32 4 6144 8", head_dim=128,
        num_experts=128, moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[], rope_theta=1e6, use_sliding_window=False)),
    "mixtral-8x7b": Shape("mixtral", "Q4_K", _config(
        "MixtralForCausalLM", "mixtral", "32000 4096 32 32 8 14336 2", head_dim=128,
        num_local_experts=8, rope_theta=1e6, rms_norm_eps=1e-5, max_position_embeddings=32_768,
        sliding_window=None)),
    "gpt-oss-20b": _gpt_oss_shape(24, 32),
    "gpt-oss-120b": _gpt_oss_shape(36, 128),
    "deepseek-v2-lite": Shape("deepseek2", "Q4_K", _config(
        "DeepseekV2ForCausalLM", "deepseek_v2", "102400 2048 27 16 16 10944 6",
        moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2, rope_theta=1e4,
        first_k_dense_replace=1, moe_layer_freq=1, kv_lora_rank=512, q_lora_rank=None,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, routed_scaling_factor=1.0,
        norm_topk_prob=False, topk_method="greedy", n_group=1, topk_group=1,
        scoring_func="softmax", max_position_embeddings=163_840,
        rope_scaling=_deepseek_yarn(40, 0.707))),
    "glm-4.5-air": Shape("glm4moe", "Q4_K", _config(
        "Glm4MoeForCausalLM", "glm4_moe", "151552 4096 46 96 8 10944 8", head_dim=128,
        moe_intermediate_size=1408, n_routed_experts=128, n_shared_experts=1, rope_theta=1e6,
        first_k_dense_replace=1, routed_scaling_factor=1.0, norm_topk_prob=True, n_group=1,
        topk_group=1, partial_rotary_factor=0.5, use_qk_norm=False, attention_bias=True,
        rms_norm_eps=1e-5, max_position_embeddings=131_072)),
    "kimi-k2": Shape("deepseek2", "Q4_K", _config(
        "DeepseekV3ForCausalLM", "deepseek_v3", "163840 7168 61 64 64 18432 8",
        moe_intermediate_size=2048, n_routed_experts=384, n_shared_experts=1, rope_theta=5e4,
        first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, routed_scaling_factor=2.827, norm_topk_prob=True,
        n_group=1, topk_group=1, max_position_embeddings=131_072,
        rope_scaling=_deepseek_yarn(32, 1.0))),
}  # fmt: skip
