"""Parameters of rotary position embeddings (RoPE) from GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from greenroom.hf.checkpoint.gguf.metadata.layers import head_size, vocabulary
from greenroom.hf.checkpoint.gguf.metadata.reader import Metadata
from greenroom.hf.checkpoint.header import read_errors

Values = dict[str, Any]
FACTORS = "rope_freqs.weight"
KIMI_VOCABULARY = 163840
MOST_FACTORS = 1 << 16
HUGE = 1e29  # llama.cpp divides angles by 1e30 where nothing is rotated
THETA = 1e4  # llama.cpp's, where metadata lack it
LOG_SCALE = 0.1  # llama.cpp's converter multiplies mscale_all_dim by this
# Factor, low and high frequency factor and original context of llama3 scaling: Llama 3.1, 3.2, 4.
LLAMA3 = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (16.0, 1.0, 1.0, 8192))


def rope(metadata: Metadata) -> Values:
    """RoPE of all dimensions of a head, with the scaling that the metadata name.

    Text has the same position in time, height and width, which the sections rotate.
    """
    values = {"rope_theta": metadata.get("rope.freq_base", THETA), **scaling(metadata)}
    if metadata.has_key("rope.dimension_sections"):
        values["mrope_section"] = metadata.array("rope.dimension_sections")[:3]
    return values


def partial_rope(metadata: Metadata) -> Values:
    """RoPE of some dimensions of a head; without the key of all."""
    size = head_size(metadata)
    return {**rope(metadata), **share(metadata.get("rope.dimension_count", size), size)}


def latent_rope(metadata: Metadata) -> Values:
    """RoPE of latent attention, whose yarn scaling has a scale for all dimensions."""
    values = rope(metadata)
    if values["rope_type"] == "yarn":
        if vocabulary(metadata) == KIMI_VOCABULARY:  # its values differ from the defaults
            metadata["rope.scaling.yarn_beta_fast"]
        scale = round(metadata["rope.scaling.yarn_log_multiplier"] / LOG_SCALE, 6)
        values |= {"mscale": scale, "mscale_all_dim": scale}
    return values


def layered_rope(
    full: Callable[[Metadata], Values], theta: str = "rope.freq_base_swa"
) -> Callable[[Metadata], Values]:
    """RoPE of layers with full attention, and another one of layers with a sliding window.

    Both rotate the same share of dimensions; only that of full attention may be scaled.
    """

    def values(metadata: Metadata) -> Values:
        parameters = full(metadata)
        sliding = {"rope_type": "default", "rope_theta": metadata.get(theta, THETA)}
        if "partial_rotary_factor" in parameters:
            sliding["partial_rotary_factor"] = parameters["partial_rotary_factor"]
        return {"full_attention": parameters, "sliding_attention": sliding}

    return values


def gpt_oss_rope(metadata: Metadata) -> Values:
    """RoPE of gpt-oss, whose yarn scaling has limits that are not rounded."""
    values = rope(metadata)
    return {**values, "truncate": False} if values["rope_type"] == "yarn" else values


def mistral_rope(metadata: Metadata) -> Values:
    """RoPE of Mistral 4, whose queries grow with their position."""
    beta = metadata.get("attention.temperature_scale", 0.1)
    part = share(metadata["rope.dimension_count"], metadata["attention.key_length_mla"])
    return {**latent_rope(metadata), **part, "llama_4_scaling_beta": beta}


def gemma_rope(metadata: Metadata) -> Values:
    """RoPE of Gemma 4, whose full attention rotates the dimensions without a huge factor."""
    factors = factors_of(metadata)
    full = {
        "rope_type": "proportional",
        "rope_theta": metadata["rope.freq_base"],
        **share(int((factors < HUGE).sum()), len(factors)),
    }
    sliding = {"rope_type": "default", "rope_theta": metadata["rope.freq_base_swa"]}
    return {"full_attention": full, "sliding_attention": sliding}


def step_rope(metadata: Metadata) -> Values:
    """RoPE of Step 3.5, whose full attention rotates half of the dimensions."""
    full = {**rope(metadata), "partial_rotary_factor": 0.5}
    sliding = {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", THETA)}
    return {"full_attention": full, "sliding_attention": sliding}


def compressed_rope(metadata: Metadata) -> Values:
    """RoPE of DeepSeek V4, whose scaling is only that of layers with a compressor."""
    part = share(metadata["rope.dimension_count"], head_size(metadata))
    theta = metadata.get("rope.freq_base", THETA)
    compress = {"rope_theta": metadata["attention.compress_rope_freq_base"], **scaling(metadata)}
    if compress["rope_type"] == "yarn":
        compress["attention_factor"] = 1.0
    return {
        "main": {"rope_type": "default", "rope_theta": theta, **part},
        "compress": {**compress, **part},
    }


def share(dimensions: int, size: int) -> Values:
    """Return the share of rotated dimensions, for a class that rounds it down."""
    factor = dimensions / size
    while int(size * factor) < dimensions:
        factor = math.nextafter(factor, math.inf)
    return {"partial_rotary_factor": factor}


def scaling(metadata: Metadata) -> Values:
    """Return the RoPE scaling of a model. Raises UnsupportedModel for longrope and others."""
    kind = metadata.get("rope.scaling.type", "none")
    factor = metadata.get("rope.scaling.factor", metadata.get("rope.scale_linear", 1.0)) or 1.0
    if metadata.has(r"rope_factors_.*"):
        raise metadata.lacking("short_mscale and long_mscale of their longrope scaling")
    if FACTORS in metadata.tensors:
        return _llama3(metadata)
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": metadata["rope.scaling.original_context_length"],
            "beta_fast": metadata.get("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": metadata.get("rope.scaling.yarn_beta_slow", 1.0),
            **_attention_factor(metadata),
        }
    if kind == "linear" or (kind == "none" and factor != 1):
        return {"rope_type": "linear", "factor": factor}
    if kind != "none":
        raise metadata.refused(f"their RoPE scaling {kind} is not supported")
    return {"rope_type": "default"}


def _attention_factor(metadata: Metadata) -> Values:
    factor = metadata.get("rope.scaling.yarn_attn_factor")
    return {} if factor is None else {"attention_factor": factor}


def _llama3(metadata: Metadata) -> Values:
    """Return the llama3 scaling whose factors a file's tensor has."""
    size = metadata.get("rope.dimension_count") or head_size(metadata)
    stored = factors_of(metadata)
    if 2 * len(stored) != size:
        raise metadata.refused(f"the tensor {FACTORS} has not a factor for two dimensions")
    theta = metadata.get("rope.freq_base", THETA)
    frequencies = 1 / theta ** (np.arange(0, size, 2, dtype=np.float64) / size)
    lengths = 2 * math.pi / frequencies
    for factor, low, high, context in LLAMA3:
        with np.errstate(divide="ignore", invalid="ignore"):
            smooth = (context / lengths - low) / (high - low)
            between = 1 / ((1 - smooth) / factor + smooth)
        expected = np.where(lengths > context / low, factor, between)
        expected = np.where(lengths < context / high, 1.0, expected)
        if np.allclose(stored, expected, 1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": context,
            }
    raise metadata.refused(f"the tensor {FACTORS} has another RoPE scaling than Llama 3 and 4")


def factors_of(metadata: Metadata) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the factors of a file's RoPE, one for two dimensions."""
    if FACTORS not in metadata.tensors:
        raise metadata.refused(f"the file lacks the tensor {FACTORS}")
    tensor = metadata.tensors[FACTORS]
    if tensor.dtype != "float32" or len(tensor.shape) != 1 or tensor.shape[0] > MOST_FACTORS:
        raise metadata.refused(f"the tensor {FACTORS} is no list of factors in F32")
    path = metadata.paths[tensor.file]
    with read_errors(path), open(path, "rb") as stream:
        stream.seek(tensor.offset)
        return np.frombuffer(stream.read(tensor.nbytes), np.float32)
