"""Describe an MoE layer's experts for the kernels: module, layout in a slot, arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor, nn

from greenroom.core.layout import PLAIN, SlotLayout, WeightSpec
from greenroom.runtime.kernels.recipes import Recipe, find_recipe
from greenroom.runtime.slots.tier import Slots

OtherSlots = Callable[[Slots], Slots]


class LayerExperts:
    """One MoE layer's experts, whose weights lie in memory slots, as kernels need them.

    It is built once, when a model is attached.

    module: a transformers experts module, or an object with its flags and resident parameters
    layout: where each of an expert's matrices lies in a slot
    slots:  the memory that is cut into slots
    recipe: the data types of the arithmetic; None: detected from the module's class
    numbers: which of the module's experts each stored expert is or replaces; None: all, in order
    first_channel: if the slots hold only a segment of each expert, the segment's first channel of
                   the intermediate dimension
    """

    def __init__(
        self,
        module: nn.Module,
        layout: SlotLayout,
        slots: Slots,
        recipe: Recipe | None = None,
        first_channel: int = 0,
        numbers: Tensor | None = None,
    ) -> None:
        self.module, self.layout, self.slots, self._numbers = module, layout, slots, numbers
        count = module.num_experts if numbers is None else len(numbers)
        self.num_experts = int(count)  # type: ignore[arg-type]
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
        self.recipe = recipe or find_recipe(module, self.dtype, LayerExperts)
        self.up_bias = self._bias(first_channel) if module.has_bias else None  # [E, 2I or I]
        self.down_bias = self._tensor("down_proj_bias") if module.has_bias else None  # [E, H]
        # Some classes compute an expert's output themselves: see `weighted_output` in hf/adapters.
        custom = getattr(module, "own_arithmetic", False)
        output = module.weighted_output if custom else None
        self.weighted_output: Callable[..., Tensor] | None = output  # type: ignore[assignment]
        self.plan: object = None  # a kernel's data for this layer

    @property
    def in_slots(self) -> LayerExperts:
        """The experts as they lie in one slot each: these, or the first of their segments."""
        return self

    def in_other_slots(self, module: nn.Module, other: OtherSlots) -> LayerExperts:
        """Return the same experts in other slots, such as those of another device.

        module: a copy of the experts module, with its resident parameters on that device
        other:  returns the slots in place of these
        """
        slots = other(self.slots)
        return LayerExperts(module, self.layout, slots, self.recipe, numbers=self._numbers)

    @cached_property
    def fallback_reason(self) -> str:
        """Return why the CPU kernel cannot compute an MoE layer, or "" if it can.

        The reason is a noun, such as "fp8 with 100 inputs", which can follow "eager for".
        """
        from greenroom.runtime.kernels.matrix import fallback_reason

        if getattr(self.module, "eager_only", False):
            return f"{type(self.module).__name__} (this class computes its experts itself)"
        return fallback_reason(self)

    def _sizes(self, weight: WeightSpec) -> tuple[int, int]:
        """Return (outputs, inputs) of a matrix; rows of an encoded one are always outputs."""
        rows, columns = weight.shape
        plain = weight.encoding == PLAIN
        return (columns, rows) if plain and self.transposed else (rows, columns)

    def _tensor(self, name: str) -> Tensor:
        values: Tensor = getattr(self.module, name).detach()
        return values if self._numbers is None else values[self._numbers.to(values.device)]

    def _bias(self, first_channel: int) -> Tensor:
        """Return the biases of the up projection; for a segment, those of its channels."""
        bias = self._tensor(f"{self.up.name}_bias")
        if bias.shape[1] == self.width:
            return bias
        runs = 2 if self.has_gate and not self.interleaved else 1
        wide = self.width // runs
        start = first_channel * wide // self.inner
        return bias.unflatten(1, (runs, -1))[:, :, start : start + wide].flatten(1).contiguous()

    def activate(self, h: Tensor) -> Tensor:
        """Apply an experts module's own activation function to n rows of up projections.

        The rows are [n, 2 I] (gate and up projection), or [n, I] in a module without a gate. The
        result is [n, I].
        """
        return self.module._apply_gate(h) if self.has_gate else self.module.act_fn(h)  # type: ignore[operator]
