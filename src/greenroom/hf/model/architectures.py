"""The table of supported architectures, from transformers' source code and the adapters.

An architecture is a folder in transformers/models, such as `qwen3_moe`. It is supported natively if
its experts classes have transformers' decorator `use_experts_implementation`. Some others need an
adapter (hf/adapters), and some are not supported. A wrapper, such as `internvl`, is a vision model
without experts of its own, whose config names a text model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.auto_factory import _get_model_class
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING,
    CONFIG_MAPPING_NAMES,
    model_type_to_module_name,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from greenroom.errors import UnsupportedModel
from greenroom.hf.adapters import ADAPTERS, load_adapter
from greenroom.hf.checkpoint.gguf.architectures import gguf_name

# MoE architectures that are not supported, by folder, with the reason.
NOT_SERVED = {
    "diffusion_gemma": "it writes whole blocks by diffusion, not one token after another",
    "doge": "its experts are single rows of two embeddings: reading one costs more than it saves",
    "openai_privacy_filter": "it labels tokens and writes none",
    "vitpose_backbone": "it finds poses in pictures and writes no text",
}

# Wrappers that a test compares with transformers, each with one text model.
WRAPPERS = frozenset({"internvl", "kimi_k25", "lfm2_vl"})

_TEXT = (
    (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
)
MODELS = Path(transformers.__file__).parent / "models"
DECORATOR = re.compile(r"^@use_experts_implementation\b(?:\(([^)]*)\))?", re.MULTILINE)
FLAG = re.compile(r"(\w+)\s*=\s*(True|False)\b")
_FLAGS = {  # remarks for the decorator's arguments that are not the default
    ("has_bias", True): "bias",
    ("has_gate", False): "no gate",
    ("has_post_expert_norm", True): "norm after each expert",
    ("is_transposed", True): "transposed",
    ("is_concatenated", False): "gate and up interleaved",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the table of architectures.

    name:    folder in transformers/models
    how:     "native", "adapter", "wrapper" (takes any text model) or "not" (supported)
    special: remarks, such as "shared experts"
    reason:  why the architecture is not supported
    tested:  whether a test compares a model of this architecture with transformers
    gguf:    name of the architecture in GGUF files, or the reason why these are not read
    """

    name: str
    how: str
    special: tuple[str, ...] = ()
    reason: str = ""
    tested: bool = False
    gguf: str = ""


def class_of(config: PreTrainedConfig) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """Find transformers' class for text generation with a config.

    Returns (class, its config). For a multimodal config this is the text model's class and config,
    if transformers has one; otherwise the class includes the vision tower. Raises UnsupportedModel
    if no class generates text, or if Greenroom does not support the architecture.
    """
    folder = model_type_to_module_name(config.model_type)
    name = (config.architectures or [config.model_type])[0]
    if folder in NOT_SERVED:
        raise UnsupportedModel(f"{name} is not supported: {NOT_SERVED[folder]}")
    if folder in ADAPTERS and (part := load_adapter(folder).config_part):
        config = getattr(config, part, config)
    for mapping, _ in _TEXT:
        if type(config) in mapping:
            kind = _get_model_class(config, mapping)
            if kind.config_class == config.sub_configs.get("text_config"):
                config = config.get_text_config()
            return kind, config
    raise UnsupportedModel(
        f"{name} is not supported: the installed transformers has no class that generates text"
        " with this architecture"
    )


def architectures() -> list[Architecture]:
    """Return the table of architectures, sorted by name; wrappers come last."""
    flags = dict(_decorated_architectures())
    types = _model_types()
    rows = []
    for name in sorted({*flags, *ADAPTERS, *NOT_SERVED}):
        if name in NOT_SERVED:
            rows.append(Architecture(name, "not", reason=NOT_SERVED[name], gguf=gguf_name(name)))
            continue
        how = "adapter" if name in ADAPTERS else "native"
        special = [_FLAGS[flag] for flag in _FLAGS if flag in flags.get(name, ())]
        if any(each in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES for each in types[name]):
            special.append("encoder-decoder")
        if _has_shared_experts(name):
            special.append("shared experts")
        if any(_takes_images(each) for each in types[name]):
            special.append("text part")
        if how == "adapter" and (remark := load_adapter(name).special):
            special.append(remark)
        rows.append(Architecture(name, how, tuple(special), tested=True, gguf=gguf_name(name)))
    return rows + _wrappers({row.name for row in rows})


def _wrappers(listed: set[str]) -> list[Architecture]:
    """Return table rows for vision models whose config names any text model."""
    return [
        Architecture(
            folder, "wrapper", ("text part: any of the others",), tested=folder in WRAPPERS
        )
        for kind in sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
        if (folder := model_type_to_module_name(kind)) not in listed
        and CONFIG_MAPPING[kind].sub_configs.get("text_config") is AutoConfig
    ]


def _takes_images(model_type: str) -> bool:
    """Check that a model type has a class that takes images and text."""
    kind = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type, "")
    return bool(kind) and not str(kind).endswith("ForCausalLM")


def _decorated_architectures() -> Iterator[tuple[str, set[tuple[str, bool]]]]:
    """Find architectures whose source code uses transformers' experts decorator.

    Yields (folder, arguments of the decorator as (name, value) pairs).
    """
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        if decorators := DECORATOR.findall(path.read_text(encoding="utf-8")):
            flags = [flag for arguments in decorators for flag in FLAG.findall(arguments)]
            yield path.parent.name, {(name, value == "True") for name, value in flags}


def _has_shared_experts(folder: str) -> bool:
    """Check that an architecture's code has shared experts, which every token uses."""
    path = MODELS / folder / f"modeling_{folder}.py"
    return "self.shared_" in path.read_text(encoding="utf-8")


def _model_types() -> dict[str, tuple[str, ...]]:
    """Return the model types that can generate text, by folder in transformers/models."""
    types: dict[str, list[str]] = {}
    for each in CONFIG_MAPPING_NAMES:
        folder = model_type_to_module_name(each)
        part = folder in ADAPTERS and load_adapter(folder).config_part
        if part or any(each in names for _, names in _TEXT):
            types.setdefault(folder, []).append(each)
    return {folder: tuple(each) for folder, each in types.items()}
