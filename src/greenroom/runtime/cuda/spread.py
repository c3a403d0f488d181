"""Experts over several devices: their slots as one tier, and a step's waves as one sum.

Slot `n * devices + d` of the tier is slot n of device d. Dense parts are on the first device. A
wave goes to the devices that hold its experts, each of which gets the step's inputs once, and what
they gave is brought back before the sum over a token's experts is taken, on the first device and in
the order of their ids. So the bits are those of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from greenroom.errors import DeviceError
from greenroom.runtime import driver
from greenroom.runtime.kernels import base, eager, fused
from greenroom.runtime.kernels.base import Kernel, LayerExperts
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.slots import InTurns


class Slots(driver.Slots, base.Slots, Protocol):
    """Those of one device."""


class SpreadSlots(InTurns[Slots]):
    """The slots of several devices; `shares(capacity)` says how many each of them has."""

    def __init__(self, each: Sequence[Slots], shares: Callable[[int], list[int]]) -> None:
        super().__init__(each)
        self.each, self._shares = self._memories, shares

    @property
    def capacity(self) -> int:
        return sum(slots.capacity for slots in self.each)

    def computed(self, slots: Sequence[int]) -> None:
        """A wave from these slots has been ordered."""
        for device, numbers in self.by_device(slots).items():
            mark = getattr(self.each[device], "computed", None)
            if mark is not None:
                mark([slots[i] // len(self.each) for i in numbers])

    def by_device(self, slots: Sequence[int]) -> dict[int, list[int]]:
        """Which of these slots each device has, as numbers within the list."""
        found: dict[int, list[int]] = {}
        for i, slot in enumerate(slots):
            found.setdefault(slot % len(self.each), []).append(i)
        return found

    def trim(self, capacity: int) -> None:
        """Have so many slots in all; where a device has no room, all are as they were."""
        before = [slots.capacity for slots in self.each]
        try:
            for slots, share in zip(self.each, self._shares(capacity), strict=True):
                if share != slots.capacity:
                    slots.trim(share)
        except DeviceError:
            for slots, had in zip(self.each, before, strict=True):
                if slots.capacity > had:
                    slots.trim(had)
            raise

    def fitting(self, capacity: int) -> int:
        """The most slots that take the memory of no more than `capacity`, on any device."""
        most = [s.fitting(n) for s, n in zip(self.each, self._shares(capacity), strict=True)]
        while any(n > m for n, m in zip(self._shares(capacity), most, strict=True)):
            capacity -= 1
        return capacity

    def close(self) -> None:
        """Let go of the memory."""
        for slots in self.each:
            slots.close()


@dataclass(slots=True)
class Step:
    """A step under way: what it was given, and the steps of the devices that have had a wave."""

    layers: list[LayerExperts]
    x: Tensor
    routing: Routing
    weights: Tensor
    each: dict[int, Any] = field(default_factory=dict)
    experts: dict[int, list[int]] = field(default_factory=dict)  # computed on each device


class Spread:
    """A kernel whose experts are on several devices."""

    def __init__(self, kernel: Kernel, slots: SpreadSlots) -> None:
        self.kernel, self.name, self._slots = kernel, kernel.name, slots
        self._layers: dict[int, list[LayerExperts]] = {}  # by the identity of the first device's

    def over(self, layer: LayerExperts, devices: Sequence[torch.device]) -> LayerExperts:
        """Have a layer computed on all devices; `layer` is that of the first."""
        others = [
            LayerExperts(
                copied(layer.module, device), layer.layout, slots, recipe=layer.recipe
            )
            for device, slots in zip(devices[1:], self._slots.each[1:], strict=True)
        ]  # fmt: skip
        self._layers[id(layer)] = [layer, *others]
        return layer

    def begin(self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor) -> Step:
        """Start a step: x [T, H], weights [T, K], on the first device."""
        return Step(self._layers[id(layer)], x, routing, weights)

    def wave(self, step: Step, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Compute experts of the step, each where its slot is."""
        for device, numbers in self._slots.by_device(slots).items():
            own = [experts[i] for i in numbers]
            places = [slots[i] // len(self._slots.each) for i in numbers]
            there = self._on(step, device)
            if device:
                partial_wave(self.kernel, there, own, places)
            else:
                self.kernel.wave(there, own, places)
            step.experts.setdefault(device, []).extend(own)

    def _on(self, step: Step, device: int) -> Any:
        """The step as a device has it."""
        if device not in step.each:
            layer = step.layers[device]
            x, weights = step.x, step.weights
            if device:
                where = layer.slots.tensor(0, layer.down).device
                x, weights = (t.to(where, non_blocking=True) for t in (x, weights))
            step.each[device] = self.kernel.begin(layer, x, step.routing, weights)
        return step.each[device]

    def first(self, step: Step) -> Any:
        """The step as the first device has it, which takes the sum."""
        return self._on(step, 0)

    def combine(self, step: Step) -> Tensor:
        """The sum over each token's experts [T, H], by ascending id, on the first device."""
        first = self._on(step, 0)
        others = {device: own for device, own in step.experts.items() if device}
        if others and 0 not in step.experts:
            self.kernel.wave(first, [], [])  # some kernels send the routing with the first wave
        for device, own in others.items():
            bring(first, step.each[device], own)
        return self.kernel.combine(first)


def partial_wave(kernel: Any, step: Any, experts: Sequence[int], slots: Sequence[int]) -> None:
    """A wave whose outputs are summed in another step: a compiled kernel that gets all experts of a
    token at once would go on to the sum, biases added in place."""
    if isinstance(step, fused.Step):
        kernel.wave(step, experts, slots, step.layer)  # as a part of each expert, which is all
    else:
        kernel.wave(step, experts, slots)


def bring(into: Any, other: Any, experts: Sequence[int]) -> None:
    """What these experts gave in another device's step, beside what is in the first one's."""
    if isinstance(into, eager.Step):
        for expert in experts:
            tokens, out = other.outputs[expert]
            into.outputs[expert] = (
                tokens.to(into.x.device),
                out.to(into.x.device, non_blocking=True),
            )
    elif isinstance(into, fused.Step):
        shape = into.routing.shape[0] * into.routing.shape[1], into.layer.hidden
        target, source = into.matrix(into.out, *shape), other.matrix(other.out, *shape)
        for expert in experts:
            rows = torch.from_numpy(into.routing.rows[into.routing.entries(expert)])
            target[rows] = source[rows]
    else:  # a GPU's: one row an entry
        for expert in experts:
            rows = into.routing.entries(expert)
            into.out[rows].copy_(other.out[rows], non_blocking=True)


def copied(module: nn.Module, device: torch.device) -> nn.Module:
    """What experts have beside their matrices (biases, norms), on another device."""
    own = next(module.parameters(), None)
    if own is None or own.device == device:
        return module
    return deepcopy(module).to(device)
