"""Kernels for split experts, whose top and bottom segments may lie in two slots.

A segment is a range of channels of an expert's intermediate dimension. Compiled kernels compute one
segment after another and accumulate the outputs. They sum the down projection in blocks of 64
channels in any case, so the bits are the same as for an unsplit expert. The eager kernel computes
an expert when all its segments are in slots, from matrices that are joined again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from greenroom.core.layout import SlotLayout, TensorSpec
from greenroom.runtime.kernels.base import KernelStep, PooledKernel
from greenroom.runtime.kernels.layer import LayerExperts, OtherSlots
from greenroom.runtime.kernels.recipes import Recipe
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.slots.cutting import Cutting
from greenroom.runtime.slots.tier import Slots


class _ThreadStep(threading.local):
    """The calling thread's step: the slots of each part of its experts."""

    def __init__(self) -> None:
        self.part_slots: dict[int, list[int]] = {}


class JoinedSlots:
    """Slots from which the eager kernel reads matrices joined from an expert's segments."""

    stride = 0

    def __init__(self, cutting: Cutting, parts: Sequence[tuple[Slots, list[Any]]]) -> None:
        """Make slots that join a split expert's matrices from its one or two parts.

        `parts` has for each part (top segments, bottom segments) its pool of slots and, for each of
        its segments, (offset in the slot, layout).
        """
        self._cutting, self._parts = cutting, parts
        self._step = _ThreadStep()

    def address(self, slot: int) -> int:
        """Return 0 as a slot's address: matrices have none before they are joined."""
        return 0

    def begin(self) -> None:
        """Forget the slots of the calling thread's last step."""
        self._step.part_slots = {}

    def add_part(self, expert: int, slot: int) -> None:
        """Record the slot of an expert's next part: the top segments, then the bottom ones."""
        self._step.part_slots.setdefault(expert, []).append(slot)

    def tensor(self, slot: int, spec: TensorSpec) -> Tensor:
        """Join one weight tensor of an expert from its segments.

        `slot` is the expert's id, not the number of a slot.
        """
        pieces = []
        for (slots, segments), at in zip(self._parts, self._step.part_slots[slot], strict=True):
            for offset, layout in segments:
                part = layout[spec.name]
                pieces.append(slots.tensor(at, replace(part, offset=offset + part.offset)))
        return self._cutting.join(spec, pieces)


class SegmentedExperts(LayerExperts):
    """One MoE layer's split experts, stored in segments of their intermediate channels.

    `parts` has one list for each pool of slots, of which there are one or two. A list has one
    `LayerExperts` for each segment that lies in the pool.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: SlotLayout,
        slots: Sequence[Slots],
        cut: int,
        recipe: Recipe | None = None,
    ) -> None:
        """Make a layer whose experts' segments lie in one or two pools of slots.

        The first `cut` segments lie in `slots[0]`, the others in `slots[1]`. If `slots` has one
        pool, all segments lie there.
        """
        self._layout, self._slots, self._cut = layout, slots, cut
        ends = [0, cut, len(layout.segments)] if len(slots) > 1 else [0, len(layout.segments)]
        groups = [layout.segments[a:b] for a, b in pairwise(ends)]
        placed = [[(s.offset - group[0].offset, s.layout) for s in group] for group in groups]
        unsplit = replace(layout, segments=())
        joined = JoinedSlots(Cutting.of(module, unsplit), list(zip(slots, placed, strict=True)))
        super().__init__(module, unsplit, joined, recipe)
        self.joined = joined
        self.parts = [
            [self._layer(module, s.layout, of, s.offset - group[0].offset, s.first) for s in group]
            for of, group in zip(slots, groups, strict=True)
        ]

    @property
    def in_slots(self) -> LayerExperts:
        return self.parts[0][0]

    def in_other_slots(self, module: nn.Module, other: OtherSlots) -> SegmentedExperts:
        slots = [other(each) for each in self._slots]
        return SegmentedExperts(module, self._layout, slots, self._cut, self.recipe)

    def _layer(
        self, module: nn.Module, layout: SlotLayout, slots: Slots, offset: int, first: int
    ) -> LayerExperts:
        moved = tuple(replace(spec, offset=spec.offset + offset) for spec in layout.tensors)
        placed = SlotLayout(moved, layout.nbytes, layout.encodings, layout.dtype)
        return LayerExperts(module, placed, slots, self.recipe, first)


class SegmentedKernel(PooledKernel):
    """A kernel that has an inner kernel compute experts stored in segments."""

    def begin(
        self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor
    ) -> KernelStep:
        layer.joined.begin()  # type: ignore[attr-defined]
        return self.kernel.begin(layer, x, routing, weights)

    def compute_group(
        self, step: Any, experts: Sequence[int], slots: Sequence[int], part: int | None = None
    ) -> None:
        """Compute the top, bottom or all segments of experts from their slots.

        `part` is 0 for the top segments and 1 for the bottom segments. With None all segments are
        computed, from slots with the same numbers in each pool.
        """
        layer: SegmentedExperts = step.layer
        numbers = self.pool_slots(slots)
        for number in range(len(layer.parts)) if part is None else (part,):
            if step.supports_segments:
                for i, segment in enumerate(layer.parts[number]):
                    step.compute_from(experts, numbers, segment, number + i > 0)
                continue
            for expert, slot in zip(experts, numbers, strict=True):
                layer.joined.add_part(expert, slot)
            if number == len(layer.parts) - 1:
                step.compute_group(experts, experts)
