"""Computation of one MoE layer's experts on several devices; the first one sums their outputs.

Slot `n * devices + d` of the cache is slot n of device d; if a device has several pools of slots,
slot n is numbered within them as on one device. Dense layers are on the first device. An
expert group is computed on the devices that have its experts in their slots; each device gets the
layer's inputs once. The outputs are copied to the first device, which sums over a token's experts
in the order of their ids. If one device computes all experts of a step, it sums itself, in the same
order. So the result is bit for bit that of computation on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from greenroom.core.plan import SKIP
from greenroom.runtime.kernels import base
from greenroom.runtime.kernels.base import Kernel
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.slots.tier import Slots, Tier, group_by_pool


class MultiDeviceStep(base.KernelStep):
    """The computation of one MoE layer's experts on several devices.

    It has a `KernelStep` for each device that is used.
    """

    def __init__(
        self,
        kernel: Kernel,
        layers: Sequence[LayerExperts],
        devices: Sequence[torch.device],
        x: Tensor,
        routing: Routing,
        weights: Tensor,
    ) -> None:
        super().__init__(layers[0], x, routing, weights)
        self._kernel: Any = kernel  # which may compute parts of experts
        self._layers, self._devices = layers, devices
        self._steps: dict[int, base.KernelStep] = {}
        self._experts: dict[int, set[int]] = {}  # computed on each device

    def compute_group(self, experts: Sequence[int], slots: Sequence[int], *part: int) -> None:
        """Compute a group of an MoE layer's experts, each on its slot's device.

        `part` is the part or form of the experts, for kernels that compute parts of them.
        """
        if part == (SKIP,):  # which have no slots
            self._kernel.compute_group(self.main_step, experts, slots, *part)
            return
        for device, places in group_by_pool(slots, len(self._layers)).items():
            local = [experts[i] for i in places]
            numbers = [slots[i] // len(self._layers) for i in places]
            self._kernel.compute_group(self._device_step(device), local, numbers, *part)
            self._experts.setdefault(device, set()).update(local)

    def _device_step(self, device: int) -> base.KernelStep:
        """Return a device's part of an MoE layer's computation; the first call begins it."""
        if device not in self._steps:
            layer = self._layers[device]
            x, weights = self.x, self.weights
            if device:
                x, weights = (t.to(self._devices[device], non_blocking=True) for t in (x, weights))
            self._steps[device] = self._kernel.begin(layer, x, self.routing, weights)
            if device:
                self._steps[device].leave_sum()
        return self._steps[device]

    @property
    def main_step(self) -> base.KernelStep:
        return self._device_step(0)

    def total(self) -> Tensor:
        if len(self._steps) == 1 and 0 not in self._steps:  # a whole layer: only its sum returns
            (only,) = self._steps.values()
            return only.total().to(self._devices[0], non_blocking=True)
        others = {device: computed for device, computed in self._experts.items() if device}
        if others and 0 not in self._experts:
            self.main_step.compute_group([], [])  # some kernels send the routing with it
        for device, computed in others.items():
            self.main_step.merge_outputs(
                self._steps[device], sorted(computed), lambda tensor: tensor
            )
        return self.main_step.combine()


class MultiDeviceKernel(Kernel):
    """Expert kernel for several devices: each expert is computed on the device of its slot."""

    def __init__(self, kernel: Kernel, slots: Tier, devices: Sequence[torch.device]) -> None:
        self.kernel, self.name, self._slots = kernel, kernel.name, slots
        self._devices = devices
        self._layers: dict[
            int, list[LayerExperts]
        ] = {}  # of all devices, by the id() of the first one's

    def prepare(self, layer: LayerExperts) -> None:
        """Register an MoE layer for computation on all devices, before `begin`.

        `layer` describes the experts in the slots of the first device.
        """
        copies = [copy_module(layer.module, device) for device in self._devices[1:]]
        self._layers[id(layer)] = [
            layer,
            *(
                layer.in_other_slots(module, partial(self._counterpart, number))
                for number, module in enumerate(copies, 1)
            ),
        ]

    def _counterpart(self, device: int, slots: Slots) -> Slots:
        """Return a device's pool of slots of the same kind as one of the first device's."""
        pools = self._slots.pools
        return pools[next(n for n, each in enumerate(pools) if each is slots) + device]

    def begin(
        self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor
    ) -> MultiDeviceStep:
        """Begin an MoE layer's computation on the devices whose slots hold its experts.

        x: hidden states [tokens, hidden]; weights: gate weights [tokens, top_k]
        """
        layers = self._layers[id(layer)]
        return MultiDeviceStep(self.kernel, layers, self._devices, x, routing, weights)

    def compute_group(
        self, step: Any, experts: Sequence[int], slots: Sequence[int], *part: int
    ) -> None:
        step.compute_group(experts, slots, *part)


def copy_module(module: nn.Module, device: torch.device) -> nn.Module:
    """Copy an experts module, with the parameters that are not in slots, to a device.

    These parameters are biases and norms. A module without parameters, or on the device already,
    is returned as it is.
    """
    parameter = next(module.parameters(), None)
    if parameter is None or parameter.device == device:
        return module
    return _copy_without_hooks(module, device)


def _copy_without_hooks(module: nn.Module, device: torch.device) -> nn.Module:
    """Copy a module to a device; its hooks report passes and cannot be copied."""
    copied = copy(module)
    attributes = vars(copied)
    attributes.pop("forward", None)
    attributes |= {name: type(hooks)() for name, hooks in vars(module).items() if "_hooks" in name
                   and isinstance(hooks, dict)}  # fmt: skip
    attributes["_parameters"] = {
        name: None if each is None else nn.Parameter(each.detach().to(device), requires_grad=False)
        for name, each in module._parameters.items()
    }
    attributes["_buffers"] = {
        name: None if each is None else each.to(device) for name, each in module._buffers.items()
    }
    attributes["_modules"] = {
        name: None if each is None else _copy_without_hooks(each, device)
        for name, each in module._modules.items()
    }
    return copied
