"""Kernel for decode steps in which some experts are computed approximately, or skipped.

Low-precision copies are in separate slots, and the kernel of their encoding computes them. A
skipped expert adds nothing. A substitute is computed from its own slot, in place of another expert.
Outputs are summed by ascending expert id, as in exact steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from greenroom.core.layout import SlotLayout
from greenroom.core.plan import LOW, SKIP
from greenroom.runtime.kernels import base, eager
from greenroom.runtime.kernels.base import PooledKernel
from greenroom.runtime.kernels.layer import LayerExperts, OtherSlots
from greenroom.runtime.kernels.recipes import Recipe
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.slots.tier import Slots


class ExpertsWithCopies(LayerExperts):
    """One MoE layer's exact experts, and their low-precision copies if there are any.

    `low` describes the copies in their own slots; it is None if there are no copies.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: SlotLayout,
        slots: Slots,
        low: tuple[SlotLayout, Slots] | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__(module, layout, slots, recipe)
        self.low = LayerExperts(module, *low, self.recipe) if low is not None else None

    def in_other_slots(self, module: nn.Module, other: OtherSlots) -> ExpertsWithCopies:
        low = None if self.low is None else (self.low.layout, other(self.low.slots))
        return ExpertsWithCopies(module, self.layout, other(self.slots), low, self.recipe)


class ApproximateKernel(PooledKernel):
    """A kernel that has an inner kernel compute some experts from low-precision copies."""

    def begin(
        self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor
    ) -> base.KernelStep:
        """Start to compute an MoE layer's experts for some tokens.

        Hidden states x are [T, H], gate weights [T, top_k]. The eager kernel computes the layer if
        no compiled matrix product reads the encoding of the low-precision copies.
        """
        low: LayerExperts | None = layer.low  # type: ignore[attr-defined]
        if low is not None and not self.kernel.supports(low):
            return eager.EagerStep(layer, x, routing, weights)
        return self.kernel.begin(layer, x, routing, weights)

    def compute_group(
        self, step: Any, experts: Sequence[int], slots: Sequence[int], part: int = 0
    ) -> None:
        """Compute experts exactly or from their low-precision copies, or skip them.

        `part` is LOW (from the copies), SKIP, or any other value for the exact weights. The
        constants are in core/plan.py.
        """
        numbers = self.pool_slots(slots)
        if part == SKIP:
            step.skip_experts(experts)
        elif part == LOW:
            step.compute_from(experts, numbers, step.layer.low)
        else:
            step.compute_group(experts, numbers)
