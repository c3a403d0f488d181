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

from greenroom.runtime.cuda.engine import Engine, Mark
from greenroom.runtime.cuda.spread import copied
from greenroom.runtime.kernels import base
from greenroom.runtime.kernels.base import Kernel
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.slots.tier import Slots

CPU = torch.device("cpu")


class Step(base.Step):
    """A step under way: the device's, and the host's once it has a part in it."""

    def __init__(self, device: base.Step, there: LayerExperts, engine: Engine) -> None:
        """`there` is the layer as the host has it."""
        super().__init__(device.layer, device.x, device.routing, device.weights)
        self.device, self._there, self._engine = device, there, engine
        self._inputs: list[tuple[Tensor, Mark]] = []  # x and weights on their way down
        self._kernel: Kernel | None = None  # what the host computes with
        self._host: base.Step | None = None
        self._experts: list[int] = []  # computed on the host

    def wave(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Compute experts of the step on the device."""
        self.device.wave(experts, slots)

    def on_host(self, experts: Sequence[int], slots: Sequence[int]) -> Callable[[], None]:
        """See `CoComputeKernel.on_host`."""
        if self._kernel is None:
            self._inputs = [self._engine.down(tensor) for tensor in (self.x, self.weights)]
            # The device's step is this thread's alone.
            self._kernel = self.device.first.host_kernel(self._there)
        return partial(self._compute, list(experts), list(slots))

    def _compute(self, experts: list[int], slots: list[int]) -> None:
        if self._host is None:
            assert self._kernel is not None
            for _, mark in self._inputs:
                self._engine.wait(mark)
            (x, _), (weights, _) = self._inputs
            self._host = self._kernel.begin(self._there, x, self.routing, weights)
        self._host.part(experts, slots, self._there)
        self._experts += experts

    def total(self) -> Tensor:
        if self._experts:
            first = self.device.first
            first.wave([], [])  # some kernels send the routing with the first wave
            first.take(self._host, self._experts, self._engine.up)
        return self.device.combine()


class CoComputeKernel(Kernel):
    """A device's kernel with the host's beside it."""

    def __init__(self, kernel: Kernel, engine: Engine, slots: Slots) -> None:
        """`slots` are those of host memory; `engine` is the first device's."""
        self.kernel, self.name = kernel, kernel.name
        self._engine, self._slots = engine, slots
        self._layers: dict[int, LayerExperts] = {}  # by the identity of the device's

    def prepare(self, layer: LayerExperts) -> None:
        """Have a layer computed on the host too."""
        self.kernel.prepare(layer)
        module = copied(layer.module, CPU)
        self._layers[id(layer)] = LayerExperts(module, layer.layout, self._slots, layer.recipe)

    def begin(self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor) -> Step:
        """Start a step: x [T, H], weights [T, K], on the first device."""
        own = self.kernel.begin(layer, x, routing, weights)
        return Step(own, self._layers[id(layer)], self._engine)

    def on_host(
        self, step: Step, experts: Sequence[int], slots: Sequence[int]
    ) -> Callable[[], None]:
        """A wave of the host's processor, to be called in its thread; the inputs begin to come down
        now. `slots` are those of host memory."""
        return step.on_host(experts, slots)
