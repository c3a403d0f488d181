"""Make a model's config from GGUF metadata, by the tables."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from greenroom.errors import GreenroomError, UnsupportedModel
from greenroom.hf.checkpoint.gguf.header import Header
from greenroom.hf.checkpoint.gguf.metadata.keys import KEYS, Source
from greenroom.hf.checkpoint.gguf.metadata.models import MODELS, MetadataModel
from greenroom.hf.checkpoint.gguf.metadata.reader import ADVICE, Metadata
from greenroom.hf.checkpoint.library_errors import check_layers, wrap_library_errors
from greenroom.json_file import printable

# Names in configs -> special tokens in the metadata.
TOKENS = {
    "bos_token_id": ("bos",),
    "eos_token_id": ("eos", "eot", "eom"),  # ends of a text, a turn and a message
    "pad_token_id": ("padding",),
}


def config_from_metadata(header: Header) -> PreTrainedConfig:
    """Make the transformers config of a GGUF model from its metadata.

    Raises UnsupportedModel if the metadata lack a value of the config, CheckpointError if a value
    is impossible.
    """
    check_layers(header.metadata, len(header.tensors), str(header.path))
    with wrap_library_errors(f"{header.path}: the metadata of this file make no valid config"):
        return _config(header)


def makes_config(header: Header) -> bool:
    """Return whether the metadata of a GGUF model have all values of a config."""
    try:
        config_from_metadata(header)
    except GreenroomError:
        return False
    return True


def _config(header: Header) -> PreTrainedConfig:
    model = MODELS.get(header.architecture)
    if model is None:
        raise UnsupportedModel(
            f"{header.path}: the metadata of this file do not have all values of a config for the"
            f" architecture {printable(header.architecture)}: {ADVICE}"
        )
    metadata = Metadata(header)
    chosen = model.model_type
    kind = CONFIG_MAPPING[chosen if isinstance(chosen, str) else chosen(metadata)]
    text = kind.sub_configs.get("text_config", kind)
    config = text(**_values(metadata, model, text))
    if text is kind or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    tied = config.tie_word_embeddings
    return kind(text_config=config.to_dict(), tie_word_embeddings=tied)


def _values(
    metadata: Metadata, model: MetadataModel, kind: type[PreTrainedConfig]
) -> dict[str, Any]:
    """Return the values of a config class by the tables."""
    valid = {*kind.__dataclass_fields__, *kind.attribute_map, "head_dim"}
    result: dict[str, Any] = {}
    for names, source in KEYS:
        name = next((name for name in names if name in valid), None)
        if name is not None and name not in model.sources:
            result[kind.attribute_map.get(name, name)] = _value(metadata, source)
    for name, source in model.sources.items():
        result[kind.attribute_map.get(name, name)] = _value(metadata, source)
    for name, tokens in TOKENS.items():
        ids = [*dict.fromkeys(t for t in map(metadata.token, tokens) if t is not None)]
        field = kind.__dataclass_fields__.get(name)
        if ids or (field is not None and "None" in str(field.type)):
            result.setdefault(name, ids if len(ids) > 1 else next(iter(ids), None))
    if model.rope is not None:
        result["rope_parameters"] = model.rope(metadata)
    return result


def _value(metadata: Metadata, source: Source) -> Any:
    return metadata[source] if isinstance(source, str) else source(metadata)
