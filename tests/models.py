"""Tiny random checkpoints of real architectures, and a slow, obvious reader of their experts.

    folder = tiny("qwen3_moe", tmp_path, dtype="bfloat16", shards=3)
    folder = cached_tiny("mixtral")            # the same for the whole test session

Weights are seeded and large enough that routing varies and logits differ. Files are written by
transformers' own `save_pretrained`, so names and layout are those of the hub.
"""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
from transformers.utils import logging as transformers_logging

from greenroom.core.layout import Catalog

VOCAB = 320
CLOCK = 20260101  # the seed of everything here

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
    "pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
EIGHT = {"num_experts": 8, "moe_intermediate_size": 24}
LOCAL = {"num_local_experts": 8}
DEEPSEEK = {
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
LINEAR_ATTENTION = {
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

# What each architecture needs beside COMMON; None takes a key of COMMON away.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "afmoe": {**EIGHT, "head_dim": 8, "num_dense_layers": 1, "layer_types": None},
    "aria_text": {"moe_num_experts": 8},
    "axk1": DEEPSEEK,
    "bailing_hybrid": {**EIGHT, "n_group": 2, "topk_group": 1},
    "cohere2_moe": {**EIGHT, "head_dim": 8},
    "deepseek_v2": {**DEEPSEEK, "topk_method": "group_limited_greedy"},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": DEEPSEEK,
    "deepseek_v4": DEEPSEEK,
    "dots1": {**DEEPSEEK, "head_dim": 8},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_intermediate_size": 24, "moe_k": 2},
    "exaone_moe": {**EIGHT, "head_dim": 8},
    "flex_olmo": {"num_experts": 8},
    "flint": {**EIGHT, "head_dim": 8},
    "gemma4_text": {
        **EIGHT,
        "enable_moe_block": True,
        "head_dim": 8,
        "global_head_dim": 8,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "top_k_experts": 2,
    },
    "glm4_moe": {**DEEPSEEK, "head_dim": 8},
    "glm4_moe_lite": DEEPSEEK,
    "glm_moe_dsa": DEEPSEEK,
    "gpt_oss": {**LOCAL, "head_dim": 8, "layer_types": None, "sliding_window": 16},
    "granitemoe": LOCAL,
    "granitemoe_swa": LOCAL,
    "granitemoehybrid": {**LOCAL, "mamba_n_heads": 8, "mamba_d_head": 8},
    "granitemoeshared": {**LOCAL, "shared_intermediate_size": 16},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "head_dim": 8},
    "hy_v3": {**EIGHT, "head_dim": 8},
    "hy_v4": {"n_routed_experts": 8, "moe_intermediate_size": 24, "head_dim": 8},
    "inkling_text": {"n_routed_experts": 8, "moe_intermediate_size": 24, "head_dim": 8},
    "jamba": {"num_experts": 8, "attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**DEEPSEEK, **LOCAL},
    "kolibri1": EIGHT,
    "laguna": {**EIGHT, "head_dim": 8},
    "lfm2_moe": {**EIGHT, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]},
    "mellum": {**EIGHT, "head_dim": 8},
    "mimo_v2_flash": {**DEEPSEEK, "head_dim": 8, "num_attention_heads": 8},
    "minimax": {**LOCAL, "head_dim": 8},
    "minimax_m2": {**LOCAL, "head_dim": 8},
    "minimax_m3_vl_text": {**LOCAL, "head_dim": 8},
    "mixtral": LOCAL,
    "nemotron_h": {"n_routed_experts": 8, "moe_intermediate_size": 24},
    "olmoe": {"num_experts": 8},
    "phimoe": LOCAL,
    "qwen2_moe": {**EIGHT, "shared_expert_intermediate_size": 16},
    "qwen3_5_moe_text": {**EIGHT, **LINEAR_ATTENTION, "head_dim": 8},
    "qwen3_moe": {**EIGHT, "head_dim": 8, "mlp_only_layers": [1]},
    "qwen3_next": {**EIGHT, **LINEAR_ATTENTION, "head_dim": 8},
    "solar_open": {**DEEPSEEK, "head_dim": 8},
    "zaya": {**EIGHT, "head_dim": 8, "num_experts_per_tok": 1},
}

VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}

# Models that come with a vision tower: what the config of their text part needs beside COMMON.
MULTIMODAL: dict[str, dict[str, Any]] = {
    "glm4v_moe": {
        **DEEPSEEK,
        "head_dim": 8,
        "rope_parameters": {**ROPE, "mrope_section": [1, 1, 0]},
    },
    "qwen3_5_moe": {**EIGHT, **LINEAR_ATTENTION, "head_dim": 8, "rope_parameters": ROPE},
    "qwen3_vl_moe": {**EIGHT, "head_dim": 8, "rope_parameters": ROPE},
}


def make(name: str, dtype: str = "float32", **overrides: Any) -> PreTrainedModel:
    """A tiny random model; `overrides` go into its config."""
    values = {**COMMON, **ARCHITECTURES.get(name, MULTIMODAL.get(name, {})), **overrides}
    given = {key: value for key, value in values.items() if value is not None}
    if name in MULTIMODAL:
        given = {"text_config": given, "vision_config": VISION}
    config = AutoConfig.for_model(name, **given)
    config._experts_implementation = "eager"
    torch.manual_seed(CLOCK)
    text = name not in MULTIMODAL
    mapping = MODEL_FOR_CAUSAL_LM_MAPPING if text else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    model = mapping[type(config)](config)
    randomise(model)
    return model.to(getattr(torch, dtype))


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    """Give every parameter, and every buffer that is saved, values that matter."""
    generator = torch.Generator().manual_seed(CLOCK)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            norm = tensor.ndim == 1 and name.endswith("weight")
            tensor.copy_(1 + 0.1 * noise if norm else 0.2 * noise)
    model.tie_weights()


def tiny(
    name: str,
    folder: Path,
    dtype: str = "float32",
    shards: int = 3,
    tokenizer: bool = False,
    **overrides: Any,
) -> Path:
    """Save a tiny model of `shards` files or so; returns its folder, ready for from_pretrained."""
    model = make(name, dtype, **overrides)
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        model.save_pretrained(folder, max_shard_size=size if shards == 1 else size // shards + 1)
    finally:
        transformers_logging.set_verbosity(verbosity)
    if tokenizer:
        save_tokenizer(folder)
    return Path(folder)


_KEEP: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


@cache
def _cached(name: str, arguments: str) -> Path:
    _KEEP.append(tempfile.TemporaryDirectory(prefix=f"tiny-{name}-"))
    return tiny(name, Path(_KEEP[-1].name), **json.loads(arguments))


def cached_tiny(name: str, **arguments: Any) -> Path:
    """As `tiny`, but made once a process for the same arguments: do not change the files."""
    return _cached(name, json.dumps(arguments, sort_keys=True))


TEXT = [
    "The green room is where the performers wait before they go on stage.",
    "An expert waits on disk until its cue; the dense parts never leave.",
    "def next_token(logits): return int(logits.argmax())",
    "0123456789 + - * / ( ) [ ] { } , . ; : ! ?",
]


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE of at most VOCAB tokens, trained on a few lines; encodes any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)


def read_expert(catalog: Catalog, expert_id: int) -> dict[str, torch.Tensor]:
    """One expert's tensors by the catalog: open, seek, read, copy each block; the reference."""
    layout = catalog.layouts[catalog.layer_of(expert_id)]
    slot = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for extent in catalog.extents(expert_id):
        with open(catalog.files[extent.file], "rb") as file:
            file.seek(extent.offset)
            raw = torch.frombuffer(bytearray(file.read(extent.length)), dtype=torch.uint8)
        assert len(raw) == extent.length
        for copy in extent.copies:
            read = _strided(raw, copy.source, copy.shape, copy.source_strides, copy.source_dtype)
            write = _strided(slot, copy.target, copy.shape, copy.target_strides, copy.target_dtype)
            write.copy_(read)
    return {
        spec.name: slot[spec.offset : spec.offset + spec.nbytes]
        .view(getattr(torch, spec.dtype))
        .reshape(spec.shape)
        for spec in layout.tensors
    }


def _strided(
    raw: torch.Tensor, start: int, shape: tuple[int, int], strides: tuple[int, int], dtype: str
) -> torch.Tensor:
    """The block of a byte buffer as a view; strides in bytes, data need not be aligned."""
    kind = getattr(torch, dtype)
    size = kind.itemsize
    shift = (
        start % size
    )  # safetensors align to 8 bytes, so elements of a file's tensor do not cross
    whole = raw[shift : shift + (len(raw) - shift) // size * size].view(kind)
    assert all(stride % size == 0 for stride in strides)
    return whole.as_strided(shape, (strides[0] // size, strides[1] // size), start // size)


@cache
def reference(folder: Path, dtype: str = "auto") -> PreTrainedModel:
    """The model as transformers loads it, computed eagerly; shared by tests: do not change it."""
    config = AutoConfig.from_pretrained(folder)
    text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    auto = AutoModelForCausalLM if text else AutoModelForImageTextToText
    return auto.from_pretrained(folder, dtype=dtype, experts_implementation="eager")
