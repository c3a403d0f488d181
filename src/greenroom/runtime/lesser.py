"""Kernels over steps in which some experts are computed with less than their own weights.

Copies in low precision are computed by the kernels of their encoding, from slots of their own. An
expert that is left out gives nothing; one that a buddy stands in for is computed from that one's
slot. Outputs are kept apart and summed in the order of experts, as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from greenroom.core.layout import SlotLayout
from greenroom.core.precision import LEFT_OUT, LOW
from greenroom.runtime.kernels import eager
from greenroom.runtime.kernels.base import Kernel, LayerExperts, Slots
from greenroom.runtime.kernels.eager import Eager
from greenroom.runtime.kernels.routing import Routing


class WithCopies(LayerExperts):
    """One layer's experts; `low` are their copies, a layer of its own, where there are any."""

    def __init__(
        self,
        module: nn.Module,
        layout: SlotLayout,
        slots: Slots,
        low: tuple[SlotLayout, Slots] | None = None,
    ) -> None:
        super().__init__(module, layout, slots)
        self.low = LayerExperts(module, *low, self.recipe) if low is not None else None


class Lessened:
    """Another kernel, over `WithCopies`; slot s of a kind is number s // `kinds` there."""

    def __init__(self, kernel: Kernel, kinds: int = 1) -> None:
        self.kernel, self._kinds = kernel, kinds
        self.name = kernel.name

    def begin(self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor) -> Any:
        """Start a step: x [T, H], weights [T, K]. A layer whose copies no compiled product reads is
        left to the eager kernel."""
        assert isinstance(layer, WithCopies)
        if layer.low is not None and layer.low.unfused:
            return Eager().begin(layer, x, routing, weights)
        return self.kernel.begin(layer, x, routing, weights)

    def wave(self, step: Any, experts: Sequence[int], slots: Sequence[int], part: int = 0) -> None:
        """Compute experts of the step from their slots, or from those of their copies, or not."""
        numbers = [slot // self._kinds for slot in slots]
        if part == LEFT_OUT:
            _leave_out(step, experts)
        elif part != LOW:
            self.kernel.wave(step, experts, numbers)
        elif isinstance(step, eager.Step):
            Eager().wave(replace(step, layer=_low(step)), experts, numbers)
        else:
            self.kernel.wave(step, experts, numbers, _low(step))  # type: ignore[call-arg]

    def combine(self, step: Any) -> torch.Tensor:
        """The step's result [T, H]."""
        return self.kernel.combine(step)


def _low(step: Any) -> LayerExperts:
    layer = step.layer
    assert isinstance(layer, WithCopies)
    assert layer.low is not None
    return layer.low


def _leave_out(step: Any, experts: Sequence[int]) -> None:
    """Nothing of these experts is in the sum. The eager kernel sums what was computed; the fused
    one adds biases to whatever lies there, so it weighs nothing."""
    if isinstance(step, eager.Step):
        return
    routing = step.routing
    tokens, top_k = routing.shape
    out, weights = step.matrix(step.out, tokens * top_k, step.layer.hidden), step.weights.clone()
    for expert in experts:
        rows = routing.entries(expert)
        at = torch.from_numpy(routing.rows[rows])
        out[at] = 0
        weights.view(-1)[at] = 0
    step.weights = weights
