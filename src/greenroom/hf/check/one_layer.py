"""Compare a model with transformers layer by layer, for models larger than memory.

The inputs of every experts module are recorded in a real run from disk. Then, layer by layer,
transformers' own loading code loads the full parameters, and its eager forward is called on the
same inputs. Equal outputs in every layer make equal logits: all other parts are transformers' own.

The distance of kernels is measured to eager too. Where weights are stored in a format whose values
the model's type cannot hold, the reference is eager in float32 with those values: transformers
rounds them when it expands a checkpoint, and the distance would be mostly its own rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    """Comparison of one layer's outputs with those of transformers.

    equal:      whether every output equals `expected`, bit for bit
    grouped_mm: distance of transformers' grouped_mm to `reference`
    expected:   outputs of transformers' eager for each of `inputs`
    reference:  the same, or outputs of eager with the values as stored (see the module)
    """

    name: str
    equal: bool
    grouped_mm: float
    inputs: list[Inputs]
    expected: list[Tensor]
    reference: list[Tensor]

    def distance(self, model: PreTrainedModel) -> float:
        """Measure how far a layer of an attached model is from transformers' layer.

        Both have the same inputs.
        """
        module = model.get_submodule(self.name)
        return max(
            distance(module(*i), r) for i, r in zip(self.inputs, self.reference, strict=True)
        )


@torch.inference_mode()
def compare_layers(
    skeleton: ModelSkeleton, model: PreTrainedModel, passes: list[Tensor], in_memory: bool = False
) -> Iterator[LayerCheck]:
    """Compare a model with transformers layer by layer, on recorded inputs.

    `passes` are token ids [1, T] each; the model runs them first. `skeleton` is of the model before
    it was loaded. The model is attached, or (`in_memory`) transformers' own with all of its experts
    in memory.
    """
    checkpoint, dtype = skeleton.checkpoint, str(skeleton.dtype)[6:]
    inputs, outputs = _record(model, skeleton.catalog.layers, passes)
    for layer, name in enumerate(skeleton.catalog.layers):
        module, recorded = model.get_submodule(name), inputs[name]
        parameters = (
            {} if in_memory else load_reference_experts(ModelSkeleton.of(checkpoint, dtype), layer)
        )
        with _with_parameters(module, parameters):
            expected = _forward(module, "eager", recorded)
            grouped = _forward(module, "grouped_mm", recorded)
        reference, layout = expected, skeleton.catalog.layouts[layer]
        if not all(is_exact(layout.weight(each), skeleton.dtype) for each in layout.encodings):
            wide = [(x.float(), index, weights.float()) for x, index, weights in recorded]
            with _with_parameters(
                module, load_reference_experts(ModelSkeleton.of(checkpoint, "float32"), layer)
            ):
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
    """Return a context in which a module has these parameters instead of its own."""
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
