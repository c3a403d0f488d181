"""Compare one layer at a time with transformers, for a model that does not fit as a whole.

The inputs of every experts module are recorded in a real run from disk; then, layer by layer, the
full parameters are loaded by transformers' own loading code and its eager forward is called on the
same inputs. Equal outputs in every layer make equal logits: all other parts are transformers' own.

What kernels are measured by is eager too. Where weights are stored in a format whose values the
model's type cannot hold, it is eager in float32 with those values: transformers rounds them when it
expands a checkpoint, and the distance to that would be its own rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from greenroom.hf.check.passes import Passes
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.resolve import find_checkpoint
from greenroom.hf.model.draft import Draft
from greenroom.hf.model.implementation import IMPLEMENTATION, compute_by
from greenroom.hf.model.reference import load_experts
from greenroom.runtime.kernels.matrix import exact

Inputs = tuple[Tensor, Tensor, Tensor]  # hidden states [T, H], top-k index and weights [T, K]


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """`expected` is what transformers' eager gives for each of `inputs`; distances are to
    `reference`, which is that or eager with the values as stored, see above."""

    name: str
    equal: bool
    grouped_mm: float
    inputs: list[Inputs]
    expected: list[Tensor]
    reference: list[Tensor]

    def distance(self, model: PreTrainedModel) -> float:
        """How far an attached model's layer is from the reference on the same inputs."""
        module = model.get_submodule(self.name)
        return max(_gap(module(*i), r) for i, r in zip(self.inputs, self.reference, strict=True))


@torch.inference_mode()
def compare_layers(
    source: str, dtype: str, model: PreTrainedModel, passes: list[Tensor]
) -> Iterator[LayerCheck]:
    """Run `passes` (token ids [1, T] each) on an attached model, then check layer after layer."""
    names = model.greenroom.parts.catalog.layers
    inputs, outputs = _record(model, names, passes)
    checkpoint = find_checkpoint(source)
    for layer, name in enumerate(names):
        module = model.get_submodule(name)
        with _filled(module, load_experts(Draft.of(checkpoint, dtype), layer)):
            expected = _forward(model, module, "eager", inputs[name])
            grouped = _forward(model, module, "grouped_mm", inputs[name])
        reference = _as_stored(checkpoint, dtype, layer, model, inputs[name]) or expected
        yield LayerCheck(
            name,
            all(map(torch.equal, expected, outputs[name])),
            max(map(_gap, grouped, reference)),
            inputs[name],
            expected,
            reference,
        )


@torch.inference_mode()
def reference_layers(
    source: str, dtype: str, model: PreTrainedModel, names: tuple[str, ...], passes: list[Tensor]
) -> Iterator[LayerCheck]:
    """The same of a whole model, computed by transformers' eager."""
    inputs, outputs = _record(model, names, passes)
    checkpoint = find_checkpoint(source)
    for layer, name in enumerate(names):
        given, expected = inputs[name], outputs[name]
        grouped = _forward(model, model.get_submodule(name), "grouped_mm", given, "eager")
        reference = _as_stored(checkpoint, dtype, layer, model, given, "eager") or expected
        yield LayerCheck(name, True, max(map(_gap, grouped, reference)), given, expected, reference)


def _as_stored(
    checkpoint: Checkpoint,
    dtype: str,
    layer: int,
    model: PreTrainedModel,
    inputs: list[Inputs],
    afterwards: str = IMPLEMENTATION,
) -> list[Tensor]:
    """Eager in float32 with the values that the format says; [] where the model's type has them."""
    draft = Draft.of(checkpoint, dtype)
    layout = draft.catalog.layouts[layer]
    if all(exact(layout.weight(name), draft.dtype) for name in layout.encodings):
        return []
    wide = [(x.float(), index, weights.float()) for x, index, weights in inputs]
    module = model.get_submodule(draft.catalog.layers[layer])
    with _filled(module, load_experts(Draft.of(checkpoint, "float32"), layer)):
        return _forward(model, module, "eager", wide, afterwards)


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
        request = Passes(model)
        for ids in passes:
            request(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs, outputs


@contextmanager
def _filled(module: nn.Module, parameters: dict[str, Tensor]) -> Iterator[None]:
    """The module with its parameters in memory, for a while."""
    before = {name: module._parameters.get(name) for name in parameters}
    for name, tensor in parameters.items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    try:
        yield
    finally:
        for name in parameters:
            module.register_parameter(name, before[name])


def _forward(
    model: PreTrainedModel,
    module: nn.Module,
    implementation: str,
    inputs: list[Inputs],
    afterwards: str = IMPLEMENTATION,
) -> list[Tensor]:
    compute_by(implementation, module)
    try:
        return [module(*each) for each in inputs]
    finally:
        compute_by(afterwards, module)


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().max())
