"""What the expert kernels know of one layer: its module, its layout in a slot, its arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor, nn

from greenroom.core.layout import PLAIN, SlotLayout, WeightSpec
from greenroom.runtime.kernels.recipes import Recipe, recipe_of
from greenroom.runtime.slots.tier import Slots


class LayerExperts:
    """One layer's experts, whose weights lie in slots. Built once, when a model is attached.

    module: a transformers experts module, or anything with its flags and resident parameters
    layout: how the expert's matrices lie in a slot
    slots:  where the slots are
    first:  where the layout is that of a piece: the first of its intermediate channels
    """

    def __init__(
        self,
        module: nn.Module,
        layout: SlotLayout,
        slots: Slots,
        recipe: Recipe | None = None,
        first: int = 0,
    ) -> None:
        self.module, self.layout, self.slots = module, layout, slots
        self.num_experts = int(module.num_experts)  # type: ignore[arg-type]
        self.has_gate = bool(module.has_gate)
        self.transposed = bool(module.is_transposed)
        self.interleaved = self.has_gate and not module.is_concatenated
        self.up_weight = layout.weight("gate_up_proj" if self.has_gate else "up_proj")
        self.down_weight = layout.weight("down_proj")
        self.up, self.down = self.up_weight.parts[0], self.down_weight.parts[0]
        self.dtype: torch.dtype = getattr(torch, self.up_weight.dtype)
        self.hidden, self.inner = self._sizes(self.down_weight)
        self.width = self._sizes(self.up_weight)[0]
        norm = module.post_expert_norm if module.has_post_expert_norm else None
        self.norm: Callable[[Tensor], Tensor] | None = norm  # type: ignore[assignment]
        self.recipe = recipe or recipe_of(module, self.dtype, LayerExperts)
        self.up_bias = self._bias(first) if module.has_bias else None  # [E, 2I or I]
        self.down_bias = self._tensor("down_proj_bias") if module.has_bias else None  # [E, H]
        # Some classes compute an expert's output themselves: see `weighted_output` in hf/adapters.
        own = getattr(module, "own_arithmetic", False)
        self.own: Callable[..., Tensor] | None = module.weighted_output if own else None  # type: ignore[assignment]
        self.plan: object = None  # what a kernel keeps for this layer

    @cached_property
    def fallback_reason(self) -> str:
        """Why the compiled kernels leave this layer to the eager one; "" where they do not."""
        from greenroom.runtime.kernels.matrix import fallback_reason

        if getattr(self.module, "eager_only", False):
            return f"{type(self.module).__name__} has an arithmetic of its own"
        return fallback_reason(self)

    def _sizes(self, weight: WeightSpec) -> tuple[int, int]:
        """(outputs, inputs) of a matrix; an encoded one lies row by output, whatever the flag."""
        rows, columns = weight.shape
        plain = weight.encoding == PLAIN
        return (columns, rows) if plain and self.transposed else (rows, columns)

    def _tensor(self, name: str) -> Tensor:
        return getattr(self.module, name).detach()

    def _bias(self, first: int) -> Tensor:
        """Biases of the first projection, those of the layout's channels where it is a piece."""
        bias = self._tensor(f"{self.up.name}_bias")
        if bias.shape[1] == self.width:
            return bias
        runs = 2 if self.has_gate and not self.interleaved else 1
        wide = self.width // runs
        start = first * wide // self.inner
        return bias.unflatten(1, (runs, -1))[:, :, start : start + wide].flatten(1).contiguous()

    def gate(self, h: Tensor) -> Tensor:
        """The module's own activation: [n, 2I] -> [n, I], or [n, I] -> [n, I] without a gate."""
        return self.module._apply_gate(h) if self.has_gate else self.module.act_fn(h)  # type: ignore[operator]
