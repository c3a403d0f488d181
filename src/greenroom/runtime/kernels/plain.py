"""Experts one by one with torch's own products, for a device's step that sums by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from greenroom.runtime.kernels import base, eager
from greenroom.runtime.kernels.base import Kernel
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.routing import Routing


class Step(base.Step):
    """Each expert's outputs [n, H], before routing weights and norm."""

    __slots__ = ("outputs",)

    def __init__(self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor) -> None:
        super().__init__(layer, x, routing, weights)
        self.outputs: dict[int, Tensor] = {}

    def wave(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        layer = self.layer
        for expert, slot in zip(experts, slots, strict=True):
            rows = torch.from_numpy(self.routing.tokens[self.routing.entries(expert)])
            up, down = (eager.matrix(layer, slot, w) for w in (layer.up_weight, layer.down_weight))
            h = eager.project(layer, self.x[rows], up, layer.up_bias, expert)
            h = eager.cast(layer, layer.gate(h))
            self.outputs[expert] = eager.project(layer, h, down, layer.down_bias, expert)

    def total(self) -> Tensor:
        raise AssertionError("the sum is taken on the device")

    def rows_of(self, expert: int) -> Tensor:
        """An expert's outputs."""
        return self.outputs[expert]


class Plain(Kernel):
    """For layers that the compiled kernel does not know."""

    name = "plain"

    def begin(self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor) -> Step:
        return Step(layer, x, routing, weights)
