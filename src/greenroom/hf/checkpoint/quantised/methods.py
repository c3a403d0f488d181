"""Quantisation methods of safetensors checkpoints: a table from each name to its reader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from greenroom.errors import UnsupportedModel
from greenroom.hf.checkpoint.quantised.compressed import combine_compressed
from greenroom.hf.checkpoint.quantised.exported import combine_exported
from greenroom.hf.checkpoint.quantised.fp8 import combine_fp8
from greenroom.hf.checkpoint.quantised.gptq import combine_awq, combine_gptq
from greenroom.hf.checkpoint.quantised.mxfp4 import combine_mxfp4
from greenroom.hf.checkpoint.quantised.parts import SERVED, QuantisedCheckpoint, Tensors
from greenroom.json_file import printable

METHODS: dict[str, Callable[[QuantisedCheckpoint], None]] = {
    "fp8": combine_fp8,
    "mxfp8": combine_fp8,
    "mxfp4": combine_mxfp4,
    "fbgemm_fp8": combine_exported,
    "modelopt": combine_exported,
    "quark": combine_exported,
    "compressed-tensors": combine_compressed,
    "gptq": combine_gptq,
    "awq": combine_awq,
}


def combine_codes_and_scales(config: dict[str, Any], tensors: Tensors, folder: Path) -> Tensors:
    """Combine each quantised matrix's codes and scales into one encoded tensor.

    Returns all tensors of the checkpoint, by the names of an unquantised checkpoint; `tensors`
    itself if `config` has no quantization_config. Raises CheckpointError if the quantization_config
    is invalid, or if codes or scales are missing or have a wrong type or shape; UnsupportedModel
    for a quantisation method that Greenroom cannot decode.
    """
    settings = settings_of(config)
    if settings is None:
        return tensors
    method = str(settings.get("quant_method", "unknown"))
    checkpoint = QuantisedCheckpoint(settings, tensors, folder)
    if method not in METHODS:
        raise UnsupportedModel(
            f"{checkpoint.config}: the quantisation method {printable(method)} is not supported"
            f" ({SERVED})"
        )
    METHODS[method](checkpoint)
    return dict(checkpoint.combined)  # a copy has no room for tensors that were combined


def settings_of(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the quantization_config of a model's config, or of a config nested in it.

    None if the model is not quantised.
    """
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        settings = part.get("quantization_config")
        if isinstance(settings, dict):
            return settings
    return None
