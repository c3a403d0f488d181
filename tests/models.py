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
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)
from transformers.utils import logging as transformers_logging

from greenroom.core.layout import Catalog
from greenroom.hf.model.reference import align_weights

VOCAB = 320
CLOCK = 20260101  # the seed of all weights

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
TOKENS = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
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
HYBRID = ["linear_attention", "full_attention", "linear_attention"]
LINEAR_ATTENTION = {
    "layer_types": HYBRID,
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

INDEXED = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 2}
QWEN4 = {
    "head_dim": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "hc_count": 2,
    "hc_lowrank": 8,
    "ple_embed_dim": 8,
    "ngram_vocab_size_base": 40,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 2,
}
STANDARD = (  # keys of COMMON that some architectures name differently
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "num_experts_per_tok",
)  # fmt: skip

# Options of each architecture in addition to COMMON; None removes a key of COMMON.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "afmoe": {**EIGHT, "head_dim": 8, "num_dense_layers": 1, "layer_types": None},
    "aria_text": {"moe_num_experts": 8},
    "axk1": DEEPSEEK,
    "axk2": {**DEEPSEEK, **INDEXED, "gated_norm_rank": 8, "n_group": None, "topk_group": None},
    "bailing_hybrid": {
        **EIGHT,
        "n_group": 2,
        "topk_group": 1,
        "layer_group_size": 2,
        "num_key_value_heads": 4,
    },
    "beam": {
        **EIGHT,
        "head_dim": 8,
        "n_group": 2,
        "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "cohere2_moe": {**EIGHT, "head_dim": 8},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {
            "ffn_hidden_size": 24,
            "moe_num_experts": 8,
            "moe_top_k": 2,
            "hidden_size": 32,
        },
        **dict.fromkeys(STANDARD),
    },
    "deepseek_v2": {**DEEPSEEK, "topk_method": "group_limited_greedy"},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": DEEPSEEK,
    "deepseek_v4": DEEPSEEK,
    "dots1": {**DEEPSEEK, "head_dim": 8},
    "dots3_note_text": {
        **DEEPSEEK,
        **INDEXED,
        "head_dim": 16,
        "sliding_window": 16,
        "shared_experts_intermediate_size": 16,
        "layer_types": ["indexed_attention", "sliding_attention", "sliding_attention"],
        "per_layer_config": {},
    },
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
    "granitemoehybrid": {**LOCAL, "layer_types": HYBRID, "mamba_n_heads": 8, "mamba_d_head": 8},
    "granitemoeshared": {**LOCAL, "shared_intermediate_size": 16},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": [2, 2, 2], "head_dim": 8},
    "hy_v3": {**EIGHT, "head_dim": 8},
    "hy_v4": {"n_routed_experts": 8, "moe_intermediate_size": 24, "head_dim": 8},
    "inkling_text": {"n_routed_experts": 8, "moe_intermediate_size": 24, "head_dim": 8},
    "inkling2_text": {"n_routed_experts": 8, "moe_intermediate_size": 24, "head_dim": 8},
    "jamba": {"num_experts": 8, "attn_layer_period": 2, "attn_layer_offset": 1},
    "jetmoe": {**LOCAL, "kv_channels": 8, "num_key_value_heads": 2, "num_attention_heads": None},
    "kimi_linear": {**DEEPSEEK, **LOCAL, "layer_types": HYBRID},
    "kolibri1": EIGHT,
    "laguna": {**EIGHT, "head_dim": 8},
    "lfm2_moe": {**EIGHT, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]},
    "llama4_text": {
        **LOCAL,
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "num_hidden_layers": 4,
    },
    "longcat_flash": {
        "num_layers": 2,
        "ffn_hidden_size": 48,
        "n_routed_experts": 8,
        "zero_expert_num": 3,
        "moe_topk": 3,
        "expert_ffn_hidden_size": 24,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "num_experts_per_tok": None,
        "num_hidden_layers": 4,
        "intermediate_size": None,
    },
    "mellum": {**EIGHT, "head_dim": 8},
    "mimo_v2_flash": {**DEEPSEEK, "head_dim": 8, "num_attention_heads": 8},
    "minimax": {**LOCAL, "head_dim": 8},
    "minimax_m2": {**LOCAL, "head_dim": 8},
    "minimax_m3_vl_text": {**LOCAL, "head_dim": 8},
    "mistral4": DEEPSEEK,
    "mixtral": LOCAL,
    "nemotron_h": {"n_routed_experts": 8, "moe_intermediate_size": 24},
    "olmoe": {"num_experts": 8},
    "phimoe": LOCAL,
    "qwen2_moe": {**EIGHT, "shared_expert_intermediate_size": 16},
    "qwen3_5_moe_text": {**EIGHT, **LINEAR_ATTENTION, "head_dim": 8},
    "qwen3_moe": {**EIGHT, "head_dim": 8, "mlp_only_layers": [1]},
    "qwen4_exp_text": {**EIGHT, **LINEAR_ATTENTION, **QWEN4},
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

PICTURE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
PICTURE |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
SAM = {**PICTURE, "image_size": 64, "patch_size": 16, "output_channels": 8, "window_size": 2}
SAM |= {"downsample_channels": [8, 16], "global_attn_indexes": [0], "mlp_dim": 16}
OCR = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
OCR |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 8}

# Options of a multimodal model's config in addition to its text part's.
COMPOSITE: dict[str, dict[str, Any]] = {
    "aria": {
        "vision_config": {**PICTURE, "model_type": "idefics3_vision"},
        "projector_patch_to_query_dict": {"4": 4},
    },
    "deepseek_ocr2": {"vision_config": {"sam_config": SAM, "encoder_config": OCR}},
    "ernie4_5_vl_moe": {
        "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    },
    "gemma4": {
        "vision_config": {**OCR, "head_dim": 8, "position_embedding_size": 16},
        "audio_config": None,
    },
    "glm5_next": {
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
            "projection_intermediate_size": 16,
        }
    },
    "llama4": {
        "vision_config": {
            **PICTURE,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
    },
    "minimax_m3_vl": {"vision_config": PICTURE, "projector_hidden_size": 16},
    "mistral_large4": {"vision_config": {**PICTURE, "model_type": "pixtral", "head_dim": 8}},
    "muse_spark": {
        "vision_config": {**OCR, "pos_emb_height": 4, "pos_emb_width": 4},
        "audio_config": {
            "patch_sizes": [16],
            "hidden_sizes": [8],
            "depths": [1],
            "out_hidden_size": 32,
            "num_hidden_layers": 1,
        },
        "out_hidden_size": 32,
        "projector_hidden_size": 16,
    },
    "qwen3_omni_moe": {
        "vision_start_token_id": VOCAB - 1,
        "audio_config": {
            "d_model": 16,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 16,
            "output_dim": 32,
            "downsample_hidden_size": 8,
        },
    },
    "internvl": {
        "vision_config": {**PICTURE, "image_size": [28, 28], "patch_size": [14, 14]},
        "downsample_ratio": 0.5,
    },
    "kimi_k25": {"vision_config": PICTURE, "projection_hidden_size": 16},
    "lfm2_vl": {
        "vision_config": {**PICTURE, "model_type": "siglip2_vision_model", "num_patches": 16},
        "projector_hidden_size": 16,
    },
    "step3p7": {"vision_config": PICTURE},
    "unlimited_ocr": {
        "vision_config": {"sam_config": SAM, "encoder_config": {**PICTURE, "num_channels": 3}}
    },
}
# Where the config of several models has that of the one that is served.
PARTS: dict[str, str] = {"qwen3_omni_moe": "thinker_config"}

# Whose experts transformers keeps in another form than the socket's; tests compare their outputs.
OTHERWISE = {"dbrx", "jetmoe"}

# Models with a vision tower: options of their text part in addition to COMMON.
MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma4": ARCHITECTURES["gemma4_text"],
    "minimax_m3_vl": ARCHITECTURES["minimax_m3_vl_text"],
    "aria": {"moe_num_experts": 8},
    "deepseek_ocr2": {**DEEPSEEK, "head_dim": 8, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "ernie4_5_vl_moe": {
        "moe_num_experts": 8,
        "moe_intermediate_size": [24, 16],
        "moe_k": 2,
        "num_experts_per_tok": None,
        "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]},
    },
    "glm5_next": {
        **DEEPSEEK,
        **INDEXED,
        "qk_rope_head_dim": 0,
        "linear_head_dim": 8,
        "linear_num_heads": 2,
        "index_kpool": 4,
        "layer_types": HYBRID,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "llama4": {
        **LOCAL,
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
    },
    "mistral_large4": {
        **DEEPSEEK,
        **INDEXED,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "muse_spark": {**LOCAL, "head_dim": 8, "moe_intermediate_size": 24, "moe_hidden_size": 16},
    "qwen3_omni_moe": {**EIGHT, "head_dim": 8, "rope_parameters": ROPE},
    "step3p7": {
        **LOCAL,
        "moe_intermediate_size": 24,
        "head_dim": 8,
        "sliding_window": 16,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "swiglu_limits": [0, 0.5, 0],
        "share_expert_dim": 16,
    },
    "unlimited_ocr": {
        **DEEPSEEK,
        "head_dim": 8,
        "n_group": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "glm4v_moe": {
        **DEEPSEEK,
        "head_dim": 8,
        "rope_parameters": {**ROPE, "mrope_section": [1, 1, 0]},
    },
    "qwen3_5_moe": {**EIGHT, **LINEAR_ATTENTION, "head_dim": 8, "rope_parameters": ROPE},
    "qwen3_vl_moe": {**EIGHT, "head_dim": 8, "rope_parameters": ROPE},
}

# Models whose config chooses the text model that they wrap.
WRAPPED = {"internvl": "qwen3_moe", "kimi_k25": "deepseek_v3", "lfm2_vl": "lfm2_moe"}
MULTIMODAL |= {name: {"model_type": text, **ARCHITECTURES[text]} for name, text in WRAPPED.items()}

# Encoder-decoder models; their configs share little with COMMON.
SEQ2SEQ: dict[str, dict[str, Any]] = {
    "nllb-moe": {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 4,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "num_experts": 8,
        "encoder_sparse_step": 2,
        "decoder_sparse_step": 2,
        "decoder_start_token_id": 1,
        "max_position_embeddings": 256,
    },
    "switch_transformers": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 4,
        "num_sparse_encoder_layers": 2,
        "num_decoder_layers": 4,
        "num_sparse_decoder_layers": 2,
        "num_heads": 4,
        "num_experts": 12,
        "expert_capacity": 4,
        "decoder_start_token_id": 0,
    },
}


TYPES = sorted([*ARCHITECTURES, *MULTIMODAL, *SEQ2SEQ])  # all model types that can be made


def folder_of(model_type: str) -> str:
    """The folder of transformers with its code: what the table of architectures calls it."""
    return str(model_type_to_module_name(model_type))


def make(name: str, dtype: str = "float32", **overrides: Any) -> PreTrainedModel:
    """A tiny random model; `overrides` go into its config."""
    if name in SEQ2SEQ:
        values = {**{k: COMMON[k] for k in TOKENS}, **SEQ2SEQ[name], **overrides}
        config = AutoConfig.for_model(name, **values)
        return _random(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, config, dtype)
    values = {**COMMON, **ARCHITECTURES.get(name, MULTIMODAL.get(name, {})), **overrides}
    options = {key: value for key, value in values.items() if value is not None}
    if name in MULTIMODAL:
        options = {"text_config": options, "vision_config": VISION, **COMPOSITE.get(name, {})}
    if name in PARTS:
        options = {PARTS[name]: options, "enable_audio_output": False}
    config = AutoConfig.for_model(name, **options)
    is_composite = name in MULTIMODAL or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if is_composite else MODEL_FOR_CAUSAL_LM_MAPPING
    if name in PARTS:
        mapping = MODEL_FOR_MULTIMODAL_LM_MAPPING
    return _random(mapping, config, dtype)


def _random(mapping: Any, config: Any, dtype: str) -> PreTrainedModel:
    """The class that a mapping has for a config, with random weights."""
    config._experts_implementation = "eager"
    torch.manual_seed(CLOCK)
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
    """A checkpoint of `tiny`, written once a process for the same arguments: read-only."""
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
    elements = raw[shift : shift + (len(raw) - shift) // size * size].view(kind)
    assert all(stride % size == 0 for stride in strides)
    return elements.as_strided(shape, (strides[0] // size, strides[1] // size), start // size)


@cache
def reference(folder: Path, dtype: str = "auto") -> PreTrainedModel:
    """The model as transformers loads it, computed eagerly; shared by tests: do not change it."""
    config = AutoConfig.from_pretrained(folder)
    if part := PARTS.get(config.model_type):
        config = getattr(config, part)
        return align_weights(
            AutoModelForImageTextToText.from_pretrained(
                folder, config=config, dtype=dtype, key_mapping={rf"^{part.split('_')[0]}\.": ""}
            )
        )
    auto = next(
        auto
        for auto in (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForImageTextToText)
        if type(config) in auto._model_mapping
    )
    return align_weights(auto.from_pretrained(folder, dtype=dtype, experts_implementation="eager"))
