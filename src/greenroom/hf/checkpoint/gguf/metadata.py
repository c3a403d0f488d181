"""Make the config of a model from the metadata of its GGUF file.

Metadata lack some values of a config, which is why this is done only for the architectures of
MODELS: for these, the other values are the defaults of transformers' config class, or constants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig
from transformers.integrations.gguf import get_gguf_config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from greenroom.errors import UnsupportedModel
from greenroom.json_file import printable

# Key of the metadata after the architecture's name -> names in configs: the first one that the
# config class has is set.
KEYS: dict[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "block_count": ("num_hidden_layers",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.sliding_window": ("sliding_window",),
    "attention.q_lora_rank": ("q_lora_rank",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "rope.freq_base": ("rope_theta",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_shared_count": ("n_shared_experts",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "leading_dense_block_count": ("first_k_dense_replace",),
}
TOKENS = ("bos_token_id", "eos_token_id", "padding_token_id")
YARN = {"beta_fast": 32.0, "beta_slow": 1.0}  # transformers' and llama.cpp's defaults

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MetadataModel:
    """How a config is made from the metadata of one GGUF architecture.

    model_type: the config's model type
    constants:  values of the config that the metadata lack
    adjust:     function that returns further values, given a function that looks up a key of the
                metadata after the architecture's name, and the names of the file's tensors
    scaling:    whether yarn scaling of RoPE is supported
    """

    model_type: str
    constants: Values = field(default_factory=dict)
    adjust: Callable[[Callable[..., Any], Mapping[str, Any]], Values] = lambda key, tensors: {}
    scaling: bool = True


def _partial_rotary(key: Callable[..., Any], tensors: Mapping[str, Any]) -> Values:
    share = key("rope.dimension_count") / key("attention.key_length")
    return {
        "partial_rotary_factor": share,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "num_hidden_layers": key("block_count") - key("nextn_predict_layers", 0),
    }


def _minimax(key: Callable[..., Any], tensors: Mapping[str, Any]) -> Values:
    values: Values = {}
    if (rotary := key("rope.dimension_count", None)) is not None:
        values["rotary_dim"] = rotary
    if (function := key("expert_gating_func", None)) is not None:
        values["scoring_func"] = {0: "none", 2: "sigmoid"}.get(function, "softmax")
    return values


MODELS: dict[str, MetadataModel] = {
    "glm4moe": MetadataModel("glm4_moe", adjust=_partial_rotary),
    "gpt-oss": MetadataModel("gpt_oss"),
    "llama": MetadataModel("mixtral", scaling=False),
    "minimax-m2": MetadataModel("minimax_m2", {"use_routing_bias": True}, _minimax),
    "olmoe": MetadataModel("olmoe", scaling=False),
    "qwen2moe": MetadataModel("qwen2_moe"),
    "qwen35moe": MetadataModel("qwen3_5_moe_text", scaling=False),
    "qwen3moe": MetadataModel("qwen3_moe", {"norm_topk_prob": True}),
}


def config_from_metadata(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any], where: str
) -> PreTrainedConfig:
    """Make the transformers config of a GGUF model from its metadata.

    `tensors` has the file's tensors by name; `where` is the prefix of error messages. Raises
    UnsupportedModel if the architecture or its RoPE scaling needs a config.json.
    """
    architecture = str(metadata["general.architecture"])
    model = MODELS.get(architecture)
    if model is None:
        raise UnsupportedModel(
            f"{where}: the metadata of this file do not have all values of a config for the"
            f" architecture {printable(architecture)}: put the original model's config.json beside"
            " the file, or name its folder or hub id with --config"
        )

    def key(name: str, *default: Any) -> Any:
        full = f"{architecture}.{name}"
        return metadata.get(full, *default) if default else metadata[full]

    if architecture == "qwen35moe":
        values = get_gguf_config(dict(metadata), tuple(tensors))
    else:
        values = _general(model, key, metadata, tensors)
    if (scaling := _scaling(architecture, model, key, where)) is not None:
        values["rope_scaling"] = scaling
    kind = CONFIG_MAPPING[values.pop("model_type")]
    return kind(**values)


def _general(
    model: MetadataModel,
    key: Callable[..., Any],
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
) -> Values:
    """Return the values of a config by the general table of keys."""
    kind = CONFIG_MAPPING[model.model_type]
    values: Values = {"model_type": model.model_type, **model.constants}
    valid = {*kind.__dataclass_fields__, *kind.attribute_map, "rope_theta", "head_dim"}
    for name, options in KEYS.items():
        field_name = next((option for option in options if option in valid), None)
        if field_name is not None and (value := key(name, None)) is not None:
            values[kind.attribute_map.get(field_name, field_name)] = value
    for name in TOKENS:
        token = metadata.get(f"tokenizer.ggml.{name}")
        if token is not None:
            values[name.replace("padding", "pad")] = token
    size = key("vocab_size", None) or metadata.get("tokenizer.ggml.tokens")
    if size is not None:
        values["vocab_size"] = size
    values["tie_word_embeddings"] = "output.weight" not in tensors
    return values | model.adjust(key, tensors)


def _scaling(
    architecture: str, model: MetadataModel, key: Callable[..., Any], where: str
) -> Values | None:
    """Return the `rope_scaling` of a GGUF model's config; None without RoPE scaling."""
    kind = key("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "yarn" or not model.scaling:
        raise UnsupportedModel(
            f"{where}: the RoPE scaling {printable(kind)} is not supported for GGUF files of the"
            f" architecture {architecture} without a config: put the original model's config.json"
            " beside the file, or name its folder or hub id with --config"
        )
    return {
        "rope_type": "yarn",
        "rope_theta": key("rope.freq_base", 1e4),
        "factor": key("rope.scaling.factor"),
        "original_max_position_embeddings": key("rope.scaling.original_context_length"),
        **YARN,
        "truncate": architecture != "gpt-oss",
    }
