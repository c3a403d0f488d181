"""The table of GGUF architectures whose config the metadata make.

`constant` marks values that the metadata lack, and that all published models of an architecture
have; docs/formats.md lists them. llama.cpp computes with the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from greenroom.hf.checkpoint.gguf.metadata.keys import Source, optional
from greenroom.hf.checkpoint.gguf.metadata.kinds import deepseek2, glm4moe, granitemoe
from greenroom.hf.checkpoint.gguf.metadata.layers import (
    by_heads,
    by_tensor,
    compressed_layers,
    compression_rates,
    constant,
    delta_layers,
    ends_of_text,
    expansion,
    has_tensor,
    indexer_key_heads,
    indexer_layers,
    limits,
    mamba_blocks,
    offset,
    period,
    period_of_windows,
    plain_head_size,
    prefix_size,
    query_heads,
    recurrent_layers,
    rows,
    scoring,
    shared_experts,
    shares_keys,
    value_head_size,
    vocabulary,
    window_layers,
    window_value,
)
from greenroom.hf.checkpoint.gguf.metadata.reader import Metadata
from greenroom.hf.checkpoint.gguf.metadata.rope import (
    compressed_rope,
    gemma_rope,
    gpt_oss_rope,
    latent_rope,
    layered_rope,
    mistral_rope,
    partial_rope,
    rope,
    step_rope,
)

Values = dict[str, Any]
Sources = Mapping[str, Source]


@dataclass(frozen=True, slots=True)
class MetadataModel:
    """How a config is made from the metadata of one GGUF architecture.

    model_type: the config's model type, or a function that chooses it
    sources:    names in the config -> their values' sources, in addition to the table KEYS
    rope:       function that returns the parameters of RoPE; None for models without
    """

    model_type: str | Callable[[Metadata], str]
    sources: Sources = field(default_factory=dict)
    rope: Callable[[Metadata], Values] | None = rope


NORMALISED: Sources = {"norm_topk_prob": constant(True)}  # gate weights are divided by their sum
WINDOW: Sources = {"sliding_window": "attention.sliding_window"}
LATENT: Sources = {
    "num_key_value_heads": query_heads,
    "head_dim": "rope.dimension_count",
    "qk_rope_head_dim": "rope.dimension_count",
    "qk_nope_head_dim": plain_head_size,
    "v_head_dim": "attention.value_length_mla",
}
INDEXED: Sources = {
    "index_topk": "attention.indexer.top_k",
    "index_head_dim": "attention.indexer.key_length",
    "index_n_heads": "attention.indexer.head_count",
}
DELTA_NET: Sources = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_value_head_dim": value_head_size,
    "layer_types": delta_layers,
}
GRANITE: Sources = {
    "attention_multiplier": optional("attention.scale", 1.0),
    "embedding_multiplier": optional("embedding_scale", 1.0),
    "residual_multiplier": optional("residual_scale", 1.0),
    "logits_scaling": optional("logit_scale", 1.0),
}

MODELS: dict[str, MetadataModel] = {
    "afmoe": MetadataModel(
        "afmoe",
        {**WINDOW, "layer_types": period_of_windows(4), "mup_enabled": constant(True)},
    ),
    "bailingmoe3": MetadataModel(
        "bailing_hybrid",
        {
            **LATENT,
            "head_dim": "kda.head_dim",  # of linear attention
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
            "layer_types": recurrent_layers,
            "short_conv_kernel_size": "ssm.conv_kernel",
            "kda_safe_gate": "kda.safe_gate",
            "kda_lower_bound": "kda.gate_lower_bound",
        },
    ),
    "cohere2moe": MetadataModel(
        "cohere2_moe",
        {
            **WINDOW,
            "intermediate_size": "expert_feed_forward_length",
            "prefix_dense_intermediate_size": prefix_size,
            "layer_types": window_layers,
            "layer_norm_eps": optional("attention.layer_norm_epsilon", 1e-5),
            "rms_norm_eps": optional("attention.layer_norm_rms_epsilon", None),
            "logit_scale": "logit_scale",
            "expert_selection_fn": scoring("sigmoid", "softmax"),
        },
    ),
    "dbrx": MetadataModel(
        "dbrx",
        {
            "attn_config": lambda metadata: {
                "kv_n_heads": metadata["attention.head_count_kv"],
                "clip_qkv": metadata["attention.clamp_kqv"],
                "rope_theta": metadata["rope.freq_base"],
            },
            "ffn_config": lambda metadata: {
                "ffn_hidden_size": metadata["feed_forward_length"],
                "moe_num_experts": metadata["expert_count"],
                "moe_top_k": metadata["expert_used_count"],
            },
        },
    ),
    "deepseek2": MetadataModel(
        deepseek2,
        {
            **LATENT,
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
            "topk_method": lambda metadata: (
                "group_limited_greedy" if metadata["expert_group_count"] > 1 else "greedy"
            ),
        },
        latent_rope,
    ),
    "deepseek32": MetadataModel("deepseek_v32", {**LATENT, **INDEXED}, latent_rope),
    "deepseek4": MetadataModel(
        "deepseek_v4",
        {
            **WINDOW,
            **INDEXED,
            "intermediate_size": "expert_feed_forward_length",
            "layer_types": compressed_layers,
            "compress_rates": compression_rates,
            "mlp_layer_types": lambda metadata: [
                "hash_moe" if layer < metadata["hash_layer_count"] else "moe"
                for layer in range(metadata.layers)
            ],
            "scoring_func": scoring("sqrtsoftplus"),
            "norm_topk_prob": "expert_weights_norm",
            "swiglu_limit": "swiglu_clamp_exp",
            "o_groups": "attention.output_group_count",
            "o_lora_rank": "attention.output_lora_rank",
            "rope_theta": "rope.freq_base",
            "compress_rope_theta": "attention.compress_rope_freq_base",
            "partial_rotary_factor": lambda metadata: compressed_rope(metadata)["main"][
                "partial_rotary_factor"
            ],
            "hc_mult": "hyper_connection.count",
            "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations",
            "hc_eps": "hyper_connection.epsilon",
        },
        compressed_rope,
    ),
    "dots1": MetadataModel("dots1"),
    "ernie4_5-moe": MetadataModel(
        "ernie4_5_moe",
        {
            "moe_layer_interval": "interleave_moe_layer_step",
            "moe_layer_start_index": "leading_dense_block_count",
            "use_bias": has_tensor(r"blk\.\d+\.attn_q\.bias"),
        },
    ),
    "exaone-moe": MetadataModel("exaone_moe", {**WINDOW, "layer_types": window_layers}),
    "gemma4": MetadataModel(
        "gemma4",
        {
            **WINDOW,
            "head_dim": "attention.key_length_swa",
            "global_head_dim": "attention.key_length",
            "num_key_value_heads": window_value("attention.head_count_kv", is_sliding=True),
            "num_global_key_value_heads": window_value("attention.head_count_kv", is_sliding=False),
            "attention_k_eq_v": shares_keys,
            "layer_types": window_layers,
            "num_kv_shared_layers": optional("attention.shared_kv_layers", 0),
            "intermediate_size": lambda metadata: min(metadata.array("feed_forward_length")),
            "use_double_wide_mlp": lambda metadata: (
                len({*metadata.array("feed_forward_length")}) > 1
            ),
            "hidden_size_per_layer_input": optional("embedding_length_per_layer_input", 0),
            "vocab_size_per_layer_input": vocabulary,
            "final_logit_softcapping": optional("final_logit_softcapping", None),
            "enable_moe_block": constant(True),
        },
        gemma_rope,
    ),
    "glm4moe": MetadataModel(
        glm4moe, {"use_qk_norm": has_tensor(r"blk\.0\.attn_q_norm\.weight")}, partial_rope
    ),
    "glm-dsa": MetadataModel(
        "glm_moe_dsa", {**LATENT, **INDEXED, "indexer_types": indexer_layers}, latent_rope
    ),
    "gpt-oss": MetadataModel("gpt_oss", WINDOW, gpt_oss_rope),
    "granitehybrid": MetadataModel(
        "granitemoehybrid",
        {
            **GRANITE,
            "layer_types": recurrent_layers,
            "mamba_d_conv": "ssm.conv_kernel",
            "mamba_d_state": "ssm.state_size",
            "mamba_n_groups": "ssm.group_count",
            "mamba_n_heads": "ssm.time_step_rank",
            "mamba_d_head": value_head_size,
            "mamba_expand": expansion,
            "mamba_conv_bias": has_tensor(r"blk\.\d+\.ssm_conv1d\.bias"),
            "mamba_proj_bias": has_tensor(r"blk\.\d+\.ssm_in\.bias"),
            "position_embedding_type": lambda metadata: (
                "rope" if metadata.get("rope.scaling.finetuned", True) else None
            ),
        },
    ),
    "granitemoe": MetadataModel(granitemoe, GRANITE),
    "hunyuan-moe": MetadataModel("hunyuan_v1_moe"),
    "hy_v3": MetadataModel("hy_v3", {"num_shared_experts": shared_experts}),
    "jamba": MetadataModel(
        "jamba",
        {
            "attn_layer_offset": offset(by_heads, "attention"),
            "attn_layer_period": period(by_heads, "attention"),
            "expert_layer_offset": offset(by_tensor("ffn_gate_inp.weight"), "experts"),
            "expert_layer_period": period(by_tensor("ffn_gate_inp.weight"), "experts"),
            "mamba_d_conv": "ssm.conv_kernel",
            "mamba_d_state": "ssm.state_size",
            "mamba_dt_rank": "ssm.time_step_rank",
            "mamba_expand": expansion,
            "mamba_conv_bias": has_tensor(r"blk\.\d+\.ssm_conv1d\.bias"),
            "mamba_proj_bias": has_tensor(r"blk\.\d+\.ssm_in\.bias"),
        },
        None,
    ),
    "kimi-linear": MetadataModel(
        "kimi_linear",
        {
            **LATENT,
            **NORMALISED,
            "layer_types": recurrent_layers,
            "linear_conv_kernel_dim": "ssm.conv_kernel",
            "linear_head_dim": "kda.head_dim",
            "linear_num_heads": query_heads,
        },
        None,
    ),
    "lfm2moe": MetadataModel(
        "lfm2_moe",
        {
            **NORMALISED,
            "layer_types": lambda metadata: [
                "full_attention" if has_heads else "conv" for has_heads in by_heads(metadata)
            ],
            "conv_L_cache": "shortconv.l_cache",
            "conv_bias": has_tensor(r"blk\.\d+\.shortconv\.in_proj\.bias"),
            "use_expert_bias": has_tensor(r"blk\.\d+\.exp_probs_b\.bias"),
        },
    ),
    "llama": MetadataModel("mixtral"),
    "llama4": MetadataModel(
        "llama4_text",
        {
            "intermediate_size": "expert_feed_forward_length",
            "intermediate_size_mlp": "feed_forward_length",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
            # Scout has experts in every layer and norms, Maverick neither.
            "use_qk_norm": lambda metadata: metadata["interleave_moe_layer_step"] == 1,
        },
    ),
    "mellum": MetadataModel(
        "mellum", {**NORMALISED, **WINDOW, "layer_types": window_layers}, layered_rope(rope)
    ),
    "mimo2": MetadataModel(
        "mimo_v2_flash",
        {
            **NORMALISED,
            **WINDOW,
            "layer_types": window_layers,
            "num_key_value_heads": window_value("attention.head_count_kv", is_sliding=False),
            "v_head_dim": "attention.value_length",
            "attention_value_scale": optional("attention.value_scale", None),
        },
        layered_rope(partial_rope),
    ),
    "minimax-m2": MetadataModel(
        "minimax_m2",
        {"scoring_func": scoring("sigmoid"), "use_routing_bias": constant(True)},
        partial_rope,
    ),
    "mistral4": MetadataModel(
        "mistral4", {**LATENT, "head_dim": "attention.key_length_mla"}, mistral_rope
    ),
    "nemotron_h_moe": MetadataModel(
        "nemotron_h",
        {
            "layers_block_type": mamba_blocks,
            "ssm_state_size": "ssm.state_size",
            "mamba_num_heads": "ssm.time_step_rank",
            "mamba_head_dim": value_head_size,
            "n_groups": "ssm.group_count",
            "conv_kernel": "ssm.conv_kernel",
            "moe_latent_size": optional("moe_latent_size", None),
            "use_conv_bias": has_tensor(r"blk\.\d+\.ssm_conv1d\.bias"),
        },
        None,
    ),
    "olmoe": MetadataModel("olmoe", {"clip_qkv": optional("attention.clamp_kqv", None)}),
    "phimoe": MetadataModel("phimoe", {"lm_head_bias": has_tensor(r"output\.bias")}),
    "qwen2moe": MetadataModel("qwen2_moe"),
    "qwen35moe": MetadataModel("qwen3_5_moe_text", DELTA_NET, partial_rope),
    "qwen3moe": MetadataModel("qwen3_moe", NORMALISED),
    "qwen3next": MetadataModel("qwen3_next", {**DELTA_NET, **NORMALISED}, partial_rope),
    "qwen3vlmoe": MetadataModel("qwen3_vl_moe", NORMALISED),
    "qwen4exp": MetadataModel(
        "qwen4_exp_text",
        {
            **NORMALISED,
            **DELTA_NET,
            "layer_types": lambda metadata: [
                "indexed_attention" if kind == "full_attention" else kind
                for kind in delta_layers(metadata)
            ],
            "eos_token_id": ends_of_text,
            "hc_count": "hyper_connection.count",
            "hc_lowrank": "hyper_connection.low_rank",
            "ple_layer_ids": lambda metadata: [layer + 1 for layer in metadata.array("ple.layers")],
            "ple_embed_dim": lambda metadata: (
                metadata["embedding_length_per_layer_input"]
                * metadata["ple.heads_per_ngram"]
                * (metadata["ple.ngram_size"] - 1)
            ),
            "ple_conv_kernel_size": "ple.conv_kernel",
            "ngram_size": "ple.ngram_size",
            "heads_per_ngram": "ple.heads_per_ngram",
            "ngram_vocab_size_base": lambda metadata: metadata.array("ple.head_vocab_sizes")[0],
            "make_ngram_vocab_size_divisible_by": rows("per_layer_token_embd.weight"),
            "split_ngram_parts": constant(1),  # the file has the table in one
            "indexer_n_heads": "attention.indexer.head_count",
            "indexer_kv_heads": indexer_key_heads,
            "indexer_head_dim": "attention.indexer.key_length",
            "indexer_budget": "attention.indexer.top_k",
            "indexer_compress_ratio": "attention.compress_ratios",
            "output_gate_type": constant("sigmoid"),
        },
        partial_rope,
    ),
    "step35": MetadataModel(
        "step3p7",
        {
            **WINDOW,
            "num_attention_heads": window_value("attention.head_count", is_sliding=False),
            "num_sliding_attention_heads": window_value("attention.head_count", is_sliding=True),
            "layer_types": window_layers,
            "swiglu_limits": limits("swiglu_clamp_exp"),
            "swiglu_limits_shared": limits("swiglu_clamp_shexp"),
        },
        step_rope,
    ),
}
