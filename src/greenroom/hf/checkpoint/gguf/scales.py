"""Scales of NVFP4 matrices that a GGUF file has in tensors of their own.

llama.cpp's converter writes them for models of ModelOpt and compressed-tensors, unless all are 1:

NAME.weight       blocks of NVFP4 [outputs, inputs], or [experts, outputs, inputs]
NAME.scale        float32 [1] or [experts]: multiplies the weights of a matrix
NAME.input_scale  scale of activations, which Greenroom does not quantise: ignored
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

from greenroom.errors import CheckpointError
from greenroom.hf.checkpoint.header import StoredTensor

NVFP4, SCALED = "gguf_nvfp4", "gguf_nvfp4_scaled"
# Architectures -> matrices of a layer whose scales are a parameter of the model, which multiplies
# the product.
PARAMETERS = {"gemma4": "ffn_down_exps"}


def with_matrix_scales(
    paths: tuple[Path, ...], architecture: str, tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Combine NVFP4 matrices with their scales, and leave out scales of activations.

    `architecture` is GGUF's name. Raises CheckpointError for scales of another shape or type.
    """
    combined = dict(tensors)
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if tensor.encoding != NVFP4 or kind != "weight":
            continue
        combined.pop(f"{stem}.input_scale", None)
        key = f"{stem}.scale"
        if key not in tensors or stem.endswith(f".{PARAMETERS.get(architecture)}"):
            continue
        scale, stack = combined.pop(key), tensor.shape[:-2]
        if scale.dtype != "float32" or scale.codes or prod(scale.shape) != prod(stack):
            raise CheckpointError(
                f"{paths[scale.file]}: {key} has shape {list(scale.shape)} and type {scale.dtype},"
                f" but must be {prod(stack)} float32, a scale for each matrix of {name}: download"
                " the file again"
            )
        scale = replace(scale, shape=(*stack, 1, 1))
        combined[name] = replace(tensor, encoding=SCALED, companions=(scale,))
    return combined
