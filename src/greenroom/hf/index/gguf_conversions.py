"""Which tensors of a GGUF file become which parameter, by transformers' own GGUF mapping.

What the mapping does not say is said by the experts module's flags (how gate and up are joined).
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
    """As `find_conversions`, for GGUF's names."""
    if checkpoint.mapped:
        mapping = get_gguf_conversion_mapping(checkpoint.architecture, model.config)
        return find_conversions(model, checkpoint.tensors, mapping)
    processor = TENSOR_PROCESSORS.get(checkpoint.architecture, TensorProcessor)(config={})
    with _one_name_map():
        names = get_gguf_hf_weights_map(model, processor)
    derived = model.state_dict()
    conversions, unused = _expert_conversions(checkpoint, model, names), []
    taken = {name for r in conversions.values() for own in r.sources.values() for name in own}
    for name in [name for name in checkpoint.tensors if name not in taken]:
        target = names.get(name, names.get(name.removesuffix(".weight"), ""))
        if target not in derived:
            unused.append(name)
            continue
        _fit(checkpoint, name, tuple(derived[target].shape))
        conversions[target] = WeightConversion((target,), None, {name: [name]})
    return conversions, unused


@contextmanager
def _one_name_map() -> Iterator[None]:
    """transformers makes gguf's table of names anew for each module of the model, which takes a
    second for 16 layers; both the modules and the table grow with the layers."""
    import gguf

    made = gguf.get_tensor_name_map
    gguf.get_tensor_name_map = cache(made)
    try:
        yield
    finally:
        gguf.get_tensor_name_map = made


def _fit(checkpoint: GgufCheckpoint, name: str, shape: tuple[int, ...]) -> None:
    """Give a tensor axes of length 1 that GGUF leaves out."""
    stored: StoredTensor = checkpoint.tensors[name]
    if stored.shape != shape and prod(stored.shape) == prod(shape) and 1 in shape:
        checkpoint.tensors[name] = replace(stored, shape=shape)  # type: ignore[index]


def _expert_conversions(
    checkpoint: GgufCheckpoint, model: PreTrainedModel, names: dict[str, str]
) -> dict[str, WeightConversion]:
    """The routes to each layer's matrices; GGUF has [experts, outputs, inputs], gate and up
    apart."""
    blocks = {hf: name for name, hf in names.items()}
    conversions: dict[str, WeightConversion] = {}
    for name, module in expert_modules(model).items():
        down = f"{name}.down_proj"
        stem = blocks.get(down, "").removesuffix("ffn_down_exps")
        turn: list[ConversionOps] = [Transpose(1, 2)] if module.is_transposed else []
        join: list[ConversionOps] = [Concatenate(dim=1)]
        if not module.is_concatenated:
            join.append(Interleave(dim=1, inverse=True))
        parts = ("gate", "up") if module.has_gate else ("up",)
        first = f"{name}.gate_up_proj" if module.has_gate else f"{name}.up_proj"
        ups = [f"{stem}ffn_{part}_exps.weight" for part in parts]
        found = {
            first: _conversion(first, ups, join + turn),
            down: _conversion(down, [f"{stem}ffn_down_exps.weight"], turn),
        }
        if module.has_bias:
            biases = [name.replace(".weight", ".bias") for name in ups]
            found[f"{first}_bias"] = _conversion(f"{first}_bias", biases, join)
            found[f"{down}_bias"] = _conversion(f"{down}_bias", [f"{stem}ffn_down_exps.bias"], [])
        conversions |= {
            target: conversion
            for target, conversion in found.items()
            if all(
                name in checkpoint.tensors for own in conversion.sources.values() for name in own
            )
        }
    return conversions


def _conversion(target: str, names: list[str], operations: list[ConversionOps]) -> WeightConversion:
    sources = {name: [name] for name in names}
    if not operations:
        return WeightConversion((target,), None, sources)
    return WeightConversion((target,), WeightConverter(names, target, operations), sources)
