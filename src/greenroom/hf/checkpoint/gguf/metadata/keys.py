"""The table of keys in GGUF metadata that are common to architectures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from greenroom.hf.checkpoint.gguf.metadata.layers import (
    biased_attention,
    head_size,
    key_value_heads,
    leading_dense_layers,
    sparse_layers,
    vocabulary,
    weight_scale,
)
from greenroom.hf.checkpoint.gguf.metadata.reader import Metadata

# A required key, or a function of the metadata.
Source = str | Callable[[Metadata], Any]


def optional(name: str, default: Any) -> Callable[[Metadata], Any]:
    """Source of a value that metadata may lack."""
    return lambda metadata: metadata.get(name, default)


# Names in configs, of which a config class has one at most -> source of the value.
KEYS: tuple[tuple[tuple[str, ...], Source], ...] = (
    (("max_position_embeddings",), "context_length"),
    (("hidden_size",), "embedding_length"),
    (("intermediate_size",), "feed_forward_length"),
    (("num_hidden_layers",), lambda metadata: metadata.layers),
    (("num_attention_heads",), "attention.head_count"),
    (("num_key_value_heads",), key_value_heads),
    (("head_dim",), head_size),
    (("rms_norm_eps", "norm_eps"), "attention.layer_norm_rms_epsilon"),
    (("layer_norm_epsilon", "layer_norm_eps"), "attention.layer_norm_epsilon"),
    (("kv_lora_rank",), "attention.kv_lora_rank"),
    (("q_lora_rank",), optional("attention.q_lora_rank", None)),
    (
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        "expert_count",
    ),
    (("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), "expert_used_count"),
    (("moe_intermediate_size",), "expert_feed_forward_length"),
    (
        (
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "share_expert_dim",
        ),
        "expert_shared_feed_forward_length",
    ),
    (
        ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
        optional("expert_shared_count", 0),
    ),
    (
        (
            "routed_scaling_factor",
            "route_scale",
            "router_scaling_factor",
            "moe_router_scaling_factor",
        ),
        weight_scale,
    ),
    (("norm_topk_prob",), optional("expert_weights_norm", False)),
    (("n_group",), optional("expert_group_count", 1)),
    (("topk_group",), optional("expert_group_used_count", 1)),
    (("first_k_dense_replace", "num_dense_layers"), leading_dense_layers),
    (("mlp_layer_types",), sparse_layers),
    (("attention_bias", "qkv_bias"), biased_attention),
    (("vocab_size",), vocabulary),
    (("tie_word_embeddings",), lambda metadata: "output.weight" not in metadata.tensors),
)
