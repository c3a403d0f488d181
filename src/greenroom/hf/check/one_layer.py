"""Compare a model with transformers layer by layer, for models larger than memory.

The inputs of every experts module are recorded in a run whose experts are streamed from disk. Then,
layer by layer, transformers' own code loads the layer's parameters, and its eager forward computes
the same inputs. If all layers' outputs are equal, the logits are equal: every other module is
transformers' own.

For other kernels, the largest difference of their outputs from those of the eager forward is
measured. If the checkpoint stores values that the model's dtype cannot hold, the reference is the
eager forward in float32 with the stored values. Otherwise the difference would be mostly the
rounding of transformers, which converts the values to the model's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from greenroom.hf.check.passes import logits_of
from greenroom.hf.model.implementation import set_experts_implementation
from greenroom.hf.model.reference import load_reference_experts
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.kernels.matrix import is_exact

Inputs = tuple[Tensor, Tensor, Tensor]  # hidden states [T, H], top-k index and weights [T, K]


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """Comparison of one MoE layer's outputs with those of transformers.

    name:       the layer's experts module
    equal:      whether every recorded output equals `expected`, bit for bit
    grouped_mm: largest difference of transformers' grouped_mm outputs from `reference`
    inputs:     recorded arguments of the experts module, one tuple for each pass
    expected:   outputs of transformers' eager forward for `inputs`
    reference:  `expected`, or the outputs of the eager forward in float32 if the checkpoint stores
                values that the model's dtype cannot hold
    """

    name: str
    equal: bool
    grouped_mm: float
    inputs: list[Inputs]
    expected: list[Tensor]
    reference: list[Tensor]

    def distance(self, model: PreTrainedModel) -> float:
        """Return the largest difference of a model's layer outputs from `reference`.

        The layer of `model` computes the recorded inputs again.
        """
        module = model.get_submodule(self.name)
        return max(
            distance(module(*i), r) for i, r in zip(self.inputs, self.reference, strict=True)
        )

    def share(self, model: PreTrainedModel) -> float:
        """Return the norm of the differences from `reference`, as a share of its own norm."""
        module = model.get_submodule(self.name)
        outputs = [module(*each).double() for each in self.inputs]
        lost = sum(
            float((out - r.double()).square().sum())
            for out, r in zip(outputs, self.reference, strict=True)
        )
        return math.sqrt(lost / sum(float(r.double().square().sum()) for r in self.reference))


@torch.inference_mode()
def compare_layers(
    skeleton: ModelSkeleton, model: PreTrainedModel, passes: list[Tensor], in_memory: bool = False
) -> Iterator[LayerCheck]:
    """Compare a model with transformers layer by layer, on the inputs of its own passes.

    skeleton:  the same model without weights, with its checkpoint
    model:     a model with streamed experts; or, with `in_memory`, transformers' own model with all
               weights in memory
    passes:    token ids [1, tokens] of forward passes, which the model runs first
    """

    @cache
    def in_dtype(dtype: str) -> ModelSkeleton:  # a pack in segments has no skeleton in float32
        return ModelSkeleton.of(skeleton.checkpoint, dtype)

    dtype = str(skeleton.dtype)[6:]
    inputs, outputs = _record(model, skeleton.catalog.layers, passes)
    for layer, name in enumerate(skeleton.catalog.layers):
        module, recorded = model.get_submodule(name), inputs[name]
        parameters = {} if in_memory else load_reference_experts(in_dtype(dtype), layer)
        with _with_parameters(module, parameters):
            expected = _forward(module, "eager", recorded)
            grouped = _forward(module, "grouped_mm", recorded)
        reference, layout = expected, skeleton.catalog.layouts[layer]
        if not all(is_exact(layout.weight(each), skeleton.dtype) for each in layout.encodings):
            wide = [(x.float(), index, weights.float()) for x, index, weights in recorded]
            exact = load_reference_experts(in_dtype("float32"), layer)
            with _with_parameters(module, exact):
                reference = _forward(module, "eager", wide)
        equal = all(map(torch.equal, expected, outputs[name]))
        largest = max(map(distance, grouped, reference))
        yield LayerCheck(name, equal, largest, recorded, expected, reference)


def _record(
    model: PreTrainedModel, names: tuple[str, ...], passes: list[Tensor]
) -> tuple[dict[str, list[Inputs]], dict[str, list[Tensor]]]:
    inputs: dict[str, list[Inputs]] = {name: [] for name in names}
    outputs: dict[str, list[Tensor]] = {name: [] for name in names}

    def note(name: str):
        def hook(module: nn.Module, args: Inputs, output: Tensor) -> None:
            inputs[name].append(tuple(a.clone() for a in args))  # type: ignore[arg-type]
            outputs[name].append(output.clone())

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(note(name)) for name in names]
    try:
        logits_of(model, passes)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs, outputs


@contextmanager
def _with_parameters(module: nn.Module, parameters: dict[str, Tensor]) -> Iterator[None]:
    """Give a module these parameters instead of its own, for one context."""
    before = {name: module._parameters.get(name) for name in parameters}
    for name, tensor in parameters.items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    try:
        yield
    finally:
        for name in parameters:
            module.register_parameter(name, before[name])


def _forward(module: nn.Module, implementation: str, inputs: list[Inputs]) -> list[Tensor]:
    config: Any = module.config
    before = config._experts_implementation
    set_experts_implementation(implementation, module)
    try:
        return [module(*each) for each in inputs]
    finally:
        set_experts_implementation(before, module)


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference of two tensors."""
    return float((a.float() - b.float()).abs().max())
