"""Compare one layer at a time with transformers, for a model that does not fit as a whole.

The inputs of every experts module are recorded in a real run from disk; then, layer by layer, the
full parameters are loaded by transformers' own loading code and its eager forward is called on the
same inputs. Equal outputs in every layer make equal logits: all other parts are transformers' own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from greenroom.hf.build import IMPLEMENTATION, Draft
from greenroom.hf.checkpoint import Checkpoint, resolve
from greenroom.hf.passes import Passes
from greenroom.hf.reference import load_experts

Inputs = tuple[Tensor, Tensor, Tensor]  # hidden states [T, H], top-k index and weights [T, K]


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """`expected` is what transformers' eager gives for each of `inputs`."""

    name: str
    equal: bool
    grouped_mm: float
    inputs: list[Inputs]
    expected: list[Tensor]

    def distance(self, model: PreTrainedModel) -> float:
        """How far an attached model's layer is from eager on the same inputs."""
        module = model.get_submodule(self.name)
        return max(_gap(module(*i), e) for i, e in zip(self.inputs, self.expected, strict=True))


@torch.inference_mode()
def compare_layers(
    source: str, dtype: str, model: PreTrainedModel, passes: list[Tensor]
) -> Iterator[LayerCheck]:
    """Run `passes` (token ids [1, T] each) on an attached model, then check layer after layer."""
    names = model.greenroom.parts.catalog.layers
    inputs, outputs = _record(model, names, passes)
    checkpoint = Checkpoint.open(resolve(source))
    for layer, name in enumerate(names):
        module = model.get_submodule(name)
        with _filled(module, load_experts(Draft.of(checkpoint, dtype), layer)):
            expected = _forward(model, module, "eager", inputs[name])
            grouped = _forward(model, module, "grouped_mm", inputs[name])
        yield LayerCheck(
            name,
            all(map(torch.equal, expected, outputs[name])),
            max(map(_gap, grouped, expected)),
            inputs[name],
            expected,
        )


@torch.inference_mode()
def reference_layers(
    model: PreTrainedModel, names: tuple[str, ...], passes: list[Tensor]
) -> Iterator[LayerCheck]:
    """The same of a whole model, computed by transformers' eager."""
    inputs, outputs = _record(model, names, passes)
    for name in names:
        grouped = _forward(model, model.get_submodule(name), "grouped_mm", inputs[name], "eager")
        yield LayerCheck(
            name, True, max(map(_gap, grouped, outputs[name])), inputs[name], outputs[name]
        )


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
    for name, tensor in parameters.items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    try:
        yield
    finally:
        for name in parameters:
            module.register_parameter(name, None)


def _forward(
    model: PreTrainedModel,
    module: nn.Module,
    implementation: str,
    inputs: list[Inputs],
    afterwards: str = IMPLEMENTATION,
) -> list[Tensor]:
    # Set here: transformers passes by the classes that it did not decorate.
    config: Any = module.config
    config._experts_implementation = implementation
    try:
        return [module(*each) for each in inputs]
    finally:
        config._experts_implementation = afterwards


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().max())
