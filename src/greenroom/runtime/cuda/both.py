"""A step on a device and on the host at once: two kernels, one sum.

The host's kernel computes from the slots of host memory, on a copy of the step's inputs. What it
gives is put beside what the device gives before the sum over a token's experts is taken, on the
device and by ascending id, as ever. Where both are the same kernel (the fake device) the bits are
those of the device alone; a GPU's matrix products round otherwise than a CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from greenroom.runtime.cuda.engine import Engine, Mark
from greenroom.runtime.cuda.spread import Spread, bring, copied, partial_wave
from greenroom.runtime.kernels import base, eager, fused
from greenroom.runtime.kernels.base import Kernel, LayerExperts
from greenroom.runtime.kernels.eager import Eager
from greenroom.runtime.kernels.fused import Fused
from greenroom.runtime.kernels.routing import Routing

CPU = torch.device("cpu")


@dataclass(slots=True)
class Step:
    """A step under way: the device's, the host's once it has a part in it, and what that needs."""

    layer: LayerExperts
    device: Any
    x: Tensor
    routing: Routing
    weights: Tensor
    inputs: list[tuple[Tensor, Mark]] | None = None  # x and weights on their way down
    kernel: Any = None  # what the host computes with
    host: Any = None
    experts: list[int] = field(default_factory=list)  # computed on the host


@dataclass(slots=True)
class Rows:
    """A step of `Plain`: each expert's outputs [n, H] before routing weights and norm."""

    layer: LayerExperts
    x: Tensor
    routing: Routing
    outputs: dict[int, Tensor] = field(default_factory=dict)


class Plain:
    """Experts one by one with torch's own products: for what the compiled kernel does not know."""

    name = "plain"

    def begin(self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor) -> Rows:
        """Start a step: x [T, H]."""
        return Rows(layer, x, routing)

    def wave(self, step: Rows, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Compute experts of the step from their slots."""
        layer = step.layer
        for expert, slot in zip(experts, slots, strict=True):
            rows = torch.from_numpy(step.routing.tokens[step.routing.entries(expert)])
            up, down = (eager.matrix(layer, slot, w) for w in (layer.up_weight, layer.down_weight))
            h = eager.project(layer, step.x[rows], up, layer.up_bias, expert)
            h = eager.cast(layer, layer.gate(h))
            step.outputs[expert] = eager.project(layer, h, down, layer.down_bias, expert)


class Both:
    """A device's kernel with the host's beside it."""

    def __init__(self, kernel: Kernel | Spread, engine: Engine, slots: base.Slots) -> None:
        """`slots` are those of host memory; `engine` is the first device's."""
        self.kernel, self.name = kernel, kernel.name
        self._engine, self._slots = engine, slots
        self._layers: dict[int, LayerExperts] = {}  # by the identity of the device's

    def over(self, layer: LayerExperts) -> LayerExperts:
        """Have a layer computed on the host too. Returns it as the host has it."""
        module = copied(layer.module, CPU)
        found = LayerExperts(module, layer.layout, self._slots, recipe=layer.recipe)
        self._layers[id(layer)] = found
        return found

    def begin(self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor) -> Step:
        """Start a step: x [T, H], weights [T, K], on the first device."""
        own = self.kernel.begin(layer, x, routing, weights)
        return Step(self._layers[id(layer)], own, x, routing, weights)

    def wave(self, step: Step, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Compute experts of the step on the device."""
        self.kernel.wave(step.device, experts, slots)

    def on_host(
        self, step: Step, experts: Sequence[int], slots: Sequence[int]
    ) -> Callable[[], None]:
        """A wave of the host's processor, to be called in its thread; the inputs begin to come down
        now. `slots` are those of host memory."""
        if step.inputs is None:
            step.inputs = [self._engine.down(tensor) for tensor in (step.x, step.weights)]
            step.kernel = self._kernel(step)  # the device's step is this thread's alone
        return partial(self._compute, step, list(experts), list(slots))

    def _compute(self, step: Step, experts: list[int], slots: list[int]) -> None:
        if step.host is None:
            assert step.inputs is not None
            for _, mark in step.inputs:
                self._engine.wait(mark)
            (x, _), (weights, _) = step.inputs
            step.host = step.kernel.begin(step.layer, x, step.routing, weights)
        partial_wave(step.kernel, step.host, experts, slots)
        step.experts += experts

    def _kernel(self, step: Step) -> Any:
        """What the host computes with, so that its outputs fit the device's."""
        own = self._first(step)
        if isinstance(own, eager.Step):
            return Eager()
        if isinstance(own, fused.Step):
            return self.kernel.kernel if isinstance(self.kernel, Spread) else self.kernel
        compiled = Fused()
        return compiled if compiled.fuses(step.layer) else Plain()

    def _first(self, step: Step) -> Any:
        """The step as the first device has it."""
        return self.kernel.first(step.device) if isinstance(self.kernel, Spread) else step.device

    def combine(self, step: Step) -> Tensor:
        """The sum over each token's experts [T, H], by ascending id, on the first device."""
        if step.experts:
            first = self._first(step)
            kernel = self.kernel.kernel if isinstance(self.kernel, Spread) else self.kernel
            kernel.wave(first, [], [])  # some kernels send the routing with the first wave
            if isinstance(first, eager.Step | fused.Step):
                bring(first, step.host, step.experts)
            else:
                self._bring_up(first, step)
        return self.kernel.combine(step.device)

    def _bring_up(self, first: Any, step: Step) -> None:
        """Outputs of the host into a GPU's step, which has one row an entry."""
        each = [outputs_of(step.host, expert) for expert in step.experts]
        there = self._engine.up(torch.cat(each).to(first.out.dtype))
        for expert, rows in zip(step.experts, there.split([len(e) for e in each]), strict=True):
            first.out[step.routing.entries(expert)].copy_(rows, non_blocking=True)


def outputs_of(step: Rows | fused.Step, expert: int) -> Tensor:
    """An expert's outputs [n, H], its bias added, before routing weights and norm."""
    if isinstance(step, Rows):
        return step.outputs[expert]
    layer, routing = step.layer, step.routing
    (tokens, top_k), entries = routing.shape, routing.entries(expert)
    out = step.matrix(step.out, tokens * top_k, layer.hidden)
    h = out[torch.from_numpy(routing.rows[entries])].to(layer.recipe.compute or layer.dtype)
    return h if layer.down_bias is None else h + layer.down_bias[expert].to(h.dtype)
