"""Experts over several devices: a step's groups as one sum.

Slot `n * devices + d` of the tier is slot n of device d. Dense parts are on the first device. A
group goes to the devices that hold its experts, each of which gets the step's inputs once, and what
they gave is brought back before the sum over a token's experts is taken, on the first device and in
the order of their ids. So the bits are those of one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from greenroom.runtime.kernels import base
from greenroom.runtime.kernels.base import Kernel
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.slots.tier import Tier, group_by_pool


class SpreadStep(base.KernelStep):
    """A step under way: the steps of the devices that have had a group."""

    def __init__(
        self,
        kernel: Kernel,
        layers: Sequence[LayerExperts],
        x: Tensor,
        routing: Routing,
        weights: Tensor,
    ) -> None:
        super().__init__(layers[0], x, routing, weights)
        self._kernel, self._layers = kernel, layers
        self._steps: dict[int, base.KernelStep] = {}
        self._experts: dict[int, list[int]] = {}  # computed on each device

    def compute_group(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Compute experts of the step, each where its slot is."""
        for device, places in group_by_pool(slots, len(self._layers)).items():
            own = [experts[i] for i in places]
            numbers = [slots[i] // len(self._layers) for i in places]
            if device:
                self._on(device).compute_from(own, numbers, self._layers[device])
            else:
                self.main_step.compute_group(own, numbers)
            self._experts.setdefault(device, []).extend(own)

    def _on(self, device: int) -> base.KernelStep:
        """The step as a device has it."""
        if device not in self._steps:
            layer = self._layers[device]
            x, weights = self.x, self.weights
            if device:
                where = layer.slots.tensor(0, layer.down).device
                x, weights = (t.to(where, non_blocking=True) for t in (x, weights))
            self._steps[device] = self._kernel.begin(layer, x, self.routing, weights)
        return self._steps[device]

    @property
    def main_step(self) -> base.KernelStep:
        return self._on(0)

    def total(self) -> Tensor:
        others = {device: own for device, own in self._experts.items() if device}
        if others and 0 not in self._experts:
            self.main_step.compute_group([], [])  # some kernels send the routing with it
        for device, own in others.items():
            self.main_step.merge_outputs(self._steps[device], own, lambda tensor: tensor)
        return self.main_step.combine()


class MultiDeviceKernel(Kernel):
    """A kernel whose experts are on several devices, those of the pools of a tier."""

    def __init__(self, kernel: Kernel, slots: Tier, devices: Sequence[torch.device]) -> None:
        self.kernel, self.name, self._slots = kernel, kernel.name, slots
        self._devices = devices
        self._layers: dict[int, list[LayerExperts]] = {}  # by the identity of the first device's

    def prepare(self, layer: LayerExperts) -> None:
        """Have a layer computed on all devices; `layer` is that of the first."""
        self._layers[id(layer)] = [
            layer,
            *(
                LayerExperts(copy_module(layer.module, device), layer.layout, pool, layer.recipe)
                for device, pool in zip(self._devices[1:], self._slots.pools[1:], strict=True)
            ),
        ]

    def begin(
        self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor
    ) -> SpreadStep:
        """Start a step: x [T, H], weights [T, K], on the first device."""
        return SpreadStep(self.kernel, self._layers[id(layer)], x, routing, weights)


def copy_module(module: nn.Module, device: torch.device) -> nn.Module:
    """What experts have beside their matrices (biases, norms), on another device."""
    own = next(module.parameters(), None)
    if own is None or own.device == device:
        return module
    return deepcopy(module).to(device)
