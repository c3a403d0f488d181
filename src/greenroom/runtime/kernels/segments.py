"""Kernels over experts that lie in segments, which may be in two slots: a top and a bottom.

The fused kernels compute a segment after the other and add to what the one before has left: the
down projection is summed in blocks of 64 channels in any case, so the bits are those of a whole
expert. The eager kernel, and layers that are left to it, get the matrices joined again when the
last part is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from greenroom.core.layout import SlotLayout, TensorSpec
from greenroom.runtime.kernels.base import KernelStep, PooledKernel
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.slots.cutting import Cutting
from greenroom.runtime.slots.tier import Slots


class Joined:
    """Slots as the eager kernel wants them: whole matrices, of experts whose parts were noted."""

    stride = 0

    def __init__(self, cutting: Cutting, parts: Sequence[tuple[Slots, list[Any]]]) -> None:
        """`parts`: the slots that a part lies in, and its segments, with offsets within them."""
        self._cutting, self._parts = cutting, parts
        self.where: dict[int, list[int]] = {}  # expert -> slot of each part

    def address(self, slot: int) -> int:
        """Of no use: these are joined when they are asked for."""
        return 0

    def note(self, expert: int, slot: int) -> None:
        """The next part of an expert is in this slot."""
        self.where.setdefault(expert, []).append(slot)

    def tensor(self, slot: int, spec: TensorSpec) -> Tensor:
        """A tensor of the expert (`slot` is its id), joined from its segments."""
        found = []
        for (slots, segments), at in zip(self._parts, self.where[slot], strict=True):
            for offset, layout in segments:
                own = layout[spec.name]
                found.append(slots.tensor(at, replace(own, offset=offset + own.offset)))
        return self._cutting.joined(spec, found)


class SegmentedExperts(LayerExperts):
    """One layer's experts in segments. `parts[p]` are those of part p, as a fused kernel takes
    them: each a layer of its own, in the slots of that part."""

    def __init__(self, module: nn.Module, layout: SlotLayout, slots: Sequence[Slots], cut: int):
        """`slots` has those of each part: all segments lie in the first, or the first `cut` there
        and the others in the second."""
        ends = [0, cut, len(layout.segments)] if len(slots) > 1 else [0, len(layout.segments)]
        groups = [layout.segments[a:b] for a, b in pairwise(ends)]
        placed = [[(s.offset - group[0].offset, s.layout) for s in group] for group in groups]
        whole = replace(layout, segments=())
        joined = Joined(Cutting.of(module, whole), list(zip(slots, placed, strict=True)))
        super().__init__(module, whole, joined)
        self.joined = joined
        self.parts = [
            [self._layer(module, s.layout, of, s.offset - group[0].offset, s.first) for s in group]
            for of, group in zip(slots, groups, strict=True)
        ]

    def _layer(
        self, module: nn.Module, layout: SlotLayout, slots: Slots, offset: int, first: int
    ) -> LayerExperts:
        moved = tuple(replace(spec, offset=spec.offset + offset) for spec in layout.tensors)
        placed = SlotLayout(moved, layout.nbytes, layout.encodings, layout.dtype)
        return LayerExperts(module, placed, slots, self.recipe, first)


class SegmentedKernel(PooledKernel):
    """Another kernel, over `SegmentedExperts`."""

    def begin(
        self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor
    ) -> KernelStep:
        layer.joined.where.clear()  # type: ignore[attr-defined]
        return self.kernel.begin(layer, x, routing, weights)

    def compute_group(
        self, step: Any, experts: Sequence[int], slots: Sequence[int], part: int | None = None
    ) -> None:
        """Compute a part of these experts from its slots; all parts, from slots of the same
        numbers, where none is named."""
        layer: SegmentedExperts = step.layer
        numbers = self.numbers(slots)
        for number in range(len(layer.parts)) if part is None else (part,):
            if step.supports_segments:
                for i, segment in enumerate(layer.parts[number]):
                    step.compute_from(experts, numbers, segment, number + i > 0)
                continue
            for expert, slot in zip(experts, numbers, strict=True):
                layer.joined.note(expert, slot)
            if number == len(layer.parts) - 1:
                step.compute_group(experts, experts)
