"""Find the GGUF tensors of each model parameter, by transformers' own GGUF mapping.

The mapping does not say how an expert's gate and up matrices, which GGUF stores separately, are
joined to one parameter; flags of the experts module do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from math import prod

from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    Interleave,
    Transpose,
    WeightConverter,
)
from transformers.integrations.gguf import get_gguf_conversion_mapping
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from greenroom.hf.checkpoint.gguf import GgufCheckpoint
from greenroom.hf.checkpoint.header import StoredTensor
from greenroom.hf.index.conversions import WeightConversion, find_conversions
from greenroom.hf.index.experts import expert_modules


def gguf_conversions(
    model: PreTrainedModel, checkpoint: GgufCheckpoint
) -> tuple[dict[str, WeightConversion], list[str]]:
    """Find the weight conversions from GGUF tensors to a model's parameters.

    Returns (conversions by the full name of their first parameter, names of unused tensors), like
    `find_conversions`. Axes of length 1, which GGUF leaves out, are added to the tensors.
    """
    if checkpoint.has_value_mapping:
        mapping = get_gguf_conversion_mapping(checkpoint.architecture, model.config)
        return find_conversions(model, checkpoint.tensors, mapping)
    processor = TENSOR_PROCESSORS.get(checkpoint.architecture, TensorProcessor)(config={})
    with _cached_name_map():
        names = get_gguf_hf_weights_map(model, processor)
    parameters = model.state_dict()
    conversions, unused = _expert_conversions(checkpoint, model, names), []
    converted = {
        name for c in conversions.values() for names in c.sources.values() for name in names
    }
    for name in [name for name in checkpoint.tensors if name not in converted]:
        target = names.get(name, names.get(name.removesuffix(".weight"), ""))
        if target not in parameters:
            unused.append(name)
            continue
        _restore_axes(checkpoint, name, tuple(parameters[target].shape))
        conversions[target] = WeightConversion((target,), None, {name: [name]})
    return conversions, unused


@contextmanager
def _cached_name_map() -> Iterator[None]:
    """Context manager that caches gguf's table of tensor names.

    Otherwise transformers builds the table for every module, which takes a second for 16 layers and
    grows with the square of the number of layers.
    """
    import gguf

    original = gguf.get_tensor_name_map
    gguf.get_tensor_name_map = cache(original)
    try:
        yield
    finally:
        gguf.get_tensor_name_map = original


def _restore_axes(checkpoint: GgufCheckpoint, name: str, shape: tuple[int, ...]) -> None:
    """Restore a tensor's axes of length 1, which GGUF leaves out."""
    stored: StoredTensor = checkpoint.tensors[name]
    if stored.shape != shape and prod(stored.shape) == prod(shape) and 1 in shape:
        checkpoint.tensors[name] = replace(stored, shape=shape)  # type: ignore[index]


def _expert_conversions(
    checkpoint: GgufCheckpoint, model: PreTrainedModel, names: dict[str, str]
) -> dict[str, WeightConversion]:
    """Return the weight conversions of each layer's experts, by target parameter.

    GGUF stores gate and up matrices separately, each as [experts, outputs, inputs].
    """
    blocks = {hf: name for name, hf in names.items()}
    conversions: dict[str, WeightConversion] = {}
    for name, module in expert_modules(model).items():
        down = f"{name}.down_proj"
        stem = blocks.get(down, "").removesuffix("ffn_down_exps")
        transpose: list[ConversionOps] = [Transpose(1, 2)] if module.is_transposed else []
        join: list[ConversionOps] = [Concatenate(dim=1)]
        if not module.is_concatenated:
            join.append(Interleave(dim=1, inverse=True))
        parts = ("gate", "up") if module.has_gate else ("up",)
        first = f"{name}.gate_up_proj" if module.has_gate else f"{name}.up_proj"
        ups = [f"{stem}ffn_{part}_exps.weight" for part in parts]
        layer = {
            first: _conversion(first, ups, join + transpose),
            down: _conversion(down, [f"{stem}ffn_down_exps.weight"], transpose),
        }
        if module.has_bias:
            biases = [name.replace(".weight", ".bias") for name in ups]
            layer[f"{first}_bias"] = _conversion(f"{first}_bias", biases, join)
            layer[f"{down}_bias"] = _conversion(f"{down}_bias", [f"{stem}ffn_down_exps.bias"], [])
        conversions |= {
            target: conversion
            for target, conversion in layer.items()
            if all(
                name in checkpoint.tensors
                for names in conversion.sources.values()
                for name in names
            )
        }
    return conversions


def _conversion(target: str, names: list[str], operations: list[ConversionOps]) -> WeightConversion:
    sources = {name: [name] for name in names}
    if not operations:
        return WeightConversion((target,), None, sources)
    return WeightConversion((target,), WeightConverter(names, target, operations), sources)
