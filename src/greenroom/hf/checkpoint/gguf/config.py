"""Read the config of a GGUF model, and check that it fits the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from greenroom.errors import CheckpointError, NotAModel, UnsupportedModel
from greenroom.hf.checkpoint.gguf.architectures import fits_architecture
from greenroom.hf.checkpoint.gguf.header import Header
from greenroom.hf.checkpoint.gguf.metadata import config_from_metadata, makes_config
from greenroom.hf.checkpoint.gguf.origin import METADATA, Origin
from greenroom.hf.checkpoint.library_errors import check_layers, wrap_library_errors
from greenroom.json_file import printable, read_object

# Key of the metadata after the architecture's name -> names of the same number in configs.
COUNTS: dict[str, tuple[str, ...]] = {
    "embedding_length": ("hidden_size", "d_model"),
    "attention.head_count": ("num_attention_heads",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"),
}
EMBEDDING = "token_embd.weight"


def config_of(header: Header, origin: Origin) -> tuple[PreTrainedConfig, Origin]:
    """Return the transformers config of a GGUF model, and where it comes from.

    A config that was only guessed and does not fit the file is replaced by one made from the
    metadata. Raises CheckpointError if the config is not valid or does not fit the file,
    UnsupportedModel if the metadata lack values of a config.
    """
    if origin.config is not None:
        try:
            config = _read_config(header, origin.config)
            with wrap_library_errors(f"{origin.config}: this config does not fit {header.path}"):
                _check_fit(header, config, origin.config)
            return config, origin
        except (CheckpointError, NotAModel, UnsupportedModel):
            if not origin.is_guess or not makes_config(header):
                raise
    return config_from_metadata(header), replace(origin, config=None, text=METADATA)


def _read_config(header: Header, path: Path) -> PreTrainedConfig:
    """Read a config of transformers; return that of its text part, without quantisation."""
    kind = read_object(path, NotAModel).values.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"{path}: the installed transformers does not know the model type {printable(kind)}"
        )
    with wrap_library_errors(f"{path}: not a valid {kind} config"):
        values = CONFIG_MAPPING[kind]._dict_from_json_file(path)  # with transformers' infinities
        check_layers(values, len(header.tensors), str(path))
        config = CONFIG_MAPPING[kind].from_dict(values)
    text = config.get_text_config()
    if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        config = text
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    for each in (config, config.get_text_config()):
        each.tie_word_embeddings = "output.weight" not in header.tensors
    return config


def _check_fit(header: Header, config: PreTrainedConfig, path: Path) -> None:
    """Raise CheckpointError if a config does not fit the header of a GGUF file."""
    if not fits_architecture(config.model_type, header.architecture):
        raise _misfit(
            header,
            path,
            f"it is of the model type {printable(config.model_type)}, but the file of the"
            f" architecture {header.architecture}",
        )
    config = config.get_text_config()
    for key, names in COUNTS.items():
        expected = header.metadata.get(f"{header.architecture}.{key}")
        if not isinstance(expected, int):  # it may differ by layer
            continue
        name, got = next(((n, v) for n in names if (v := getattr(config, n, None))), ("", None))
        if isinstance(got, int) and got != expected:
            raise _misfit(header, path, f"its {name} is {got}, but {key} of the file is {expected}")
    blocks = header.metadata.get(f"{header.architecture}.block_count")
    further = header.metadata.get(f"{header.architecture}.nextn_predict_layers", 0)
    layers: Any = getattr(config, "num_hidden_layers", None)
    if isinstance(blocks, int) and layers not in (blocks, blocks - further):
        raise _misfit(header, path, f"it has {layers} layers, but the file has {blocks}")
    rows = header.tensors[EMBEDDING].shape[0] if EMBEDDING in header.tensors else None
    if rows is not None and config.vocab_size != rows:
        raise _misfit(
            header,
            path,
            f"its vocabulary has {config.vocab_size} tokens, but that of the file has {rows}",
        )


def _misfit(header: Header, path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: this config does not fit {header.path.name}: {what}: name the"
        " folder or hub id of the original model with --config"
    )
