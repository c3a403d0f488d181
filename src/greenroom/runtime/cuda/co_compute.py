"""A step on a device and on the host at once: two kernels, one sum.

The host's kernel computes from the slots of host memory, on a copy of the step's inputs. What it
gives is put beside what the device gives before the sum over a token's experts is taken, on the
device and by ascending id, as ever. Where both are the same kernel (the fake device) the bits are
those of the device alone; a GPU's matrix products round otherwise than a CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.multi_device import copy_module
from greenroom.runtime.kernels.base import Kernel, KernelStep
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.slots.tier import Slots

CPU = torch.device("cpu")


class HostShare:
    """What the host's processor computes of a step; its inputs begin to come down at once."""

    def __init__(self, step: KernelStep, layer: LayerExperts, engine: Engine) -> None:
        """`layer` is the layer as the host has it."""
        self.experts: list[int] = []  # that are computed
        self._layer, self._routing, self._engine = layer, step.routing, engine
        self._inputs = [engine.copy_to_host(tensor) for tensor in (step.x, step.weights)]
        self._kernel = step.main_step.host_kernel(layer)
        self._step: KernelStep | None = None

    def compute(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Compute experts from these slots of host memory."""
        if self._step is None:
            for _, mark in self._inputs:
                self._engine.wait(mark)
            (x, _), (weights, _) = self._inputs
            self._step = self._kernel.begin(self._layer, x, self._routing, weights)
        self._step.compute_from(experts, slots, self._layer)
        self.experts += experts

    def give(self, step: KernelStep) -> None:
        """Put what was computed into the device's step."""
        if self.experts:
            step.main_step.compute_group([], [])  # some kernels send the routing with it
            step.main_step.merge_outputs(self._step, self.experts, self._engine.copy_to_device)


class CoComputeKernel(Kernel):
    """A device's kernel with the host's beside it."""

    def __init__(self, kernel: Kernel, engine: Engine, slots: Slots) -> None:
        """`slots` are those of host memory; `engine` is the first device's."""
        self.kernel, self.name = kernel, kernel.name
        self._engine, self._slots = engine, slots
        self._layers: dict[int, LayerExperts] = {}  # by the identity of the device's
        self._part: HostShare | None = None  # of the step under way

    def prepare(self, layer: LayerExperts) -> None:
        """Have a layer computed on the host too."""
        self.kernel.prepare(layer)
        module = copy_module(layer.module, CPU)
        self._layers[id(layer)] = LayerExperts(module, layer.layout, self._slots, layer.recipe)

    def begin(
        self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor
    ) -> KernelStep:
        """Start a step: x [T, H], weights [T, K], on the first device."""
        self._part = None
        return self.kernel.begin(layer, x, routing, weights)

    def host_job(
        self, step: KernelStep, experts: Sequence[int], slots: Sequence[int]
    ) -> Callable[[], None]:
        """A group of the host's processor, to be called in its thread. `slots` are those of host
        memory."""
        if self._part is None:
            self._part = HostShare(step, self._layers[id(step.layer)], self._engine)
        return partial(self._part.compute, experts, slots)

    def combine(self, step: KernelStep) -> Tensor:
        """The step's result [T, H], in x's type."""
        part, self._part = self._part, None
        if part is not None:
            part.give(step)
        return super().combine(step)
