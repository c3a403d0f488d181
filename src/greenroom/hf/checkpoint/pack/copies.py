"""Low-precision copies in a pack: where they lie beside their experts.

An expert's run begins with its copy, padded to whole blocks; what follows is the expert itself, or,
where the two are nested, what the copy lacks of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor

from greenroom.core.layout import Copy, SlotLayout, TensorSpec
from greenroom.runtime.encodings.encoding import nibbles
from greenroom.runtime.encodings.packed import GROUP
from greenroom.runtime.slots.nested_planes import STEP, MatrixPlanes, NestedLayout

BLOCK = 4096
PRECISIONS = ("int8", "int4")
NESTED = "int8", "int4"  # what an expert is packed to, and the copy that it is made to contain


@dataclass(frozen=True, slots=True)
class LowPrecisionCopy:
    """The copies of a layer's experts: `layout` is a copy's, from the beginning of the run."""

    precision: str
    nested: bool
    layout: SlotLayout

    @property
    def stride(self) -> int:
        """Bytes of a copy in whole blocks: what is read of it, and where the expert begins."""
        return -(-self.layout.nbytes // BLOCK) * BLOCK

    @property
    def remainder(self) -> SlotLayout:
        """What a nested copy lacks: a plane of each matrix, from the end of the copy."""
        return SlotLayout.pack([(s.name, s.shape, s.dtype) for s in codes_of(self.layout)])

    def remainder_bytes(self, exact: SlotLayout) -> int:
        """Bytes of what follows the copy."""
        return self.remainder.nbytes if self.nested else exact.nbytes


def codes_of(layout: SlotLayout) -> list[TensorSpec]:
    """The codes of each matrix, without scales."""
    return [spec for spec in layout.tensors if "." not in spec.name]


def nested_layout(exact: SlotLayout) -> SlotLayout:
    """The layout of copies that experts of this one contain."""
    kind, precision = NESTED
    made = []
    for spec in codes_of(exact):
        rows, columns = spec.shape
        group = gcd(columns, GROUP[kind])
        made.append((spec.name, (rows, columns // 2), "uint8"))
        made.append((f"{spec.name}.scale", (rows, columns // group), "float16"))
    names = [spec.name for spec in codes_of(exact)]
    return SlotLayout.pack(made, dict.fromkeys(names, precision), exact.dtype)


def nesting_of(
    low_copy: LowPrecisionCopy, exact: SlotLayout
) -> tuple[NestedLayout, tuple[Copy, ...], tuple[Copy, ...]]:
    """(how experts are joined, the copies that fill a slot with both planes, and with the rest)."""
    remainder, planes, first, second = low_copy.remainder, [], [], []
    for spec in codes_of(exact):
        scale, half = exact[f"{spec.name}.scale"], spec.nbytes // 2
        planes.append(MatrixPlanes(spec.offset, spec.nbytes, scale.offset, scale.nbytes))
        first.append(contiguous_copy(low_copy.layout[spec.name].offset, spec.offset, half))
        first.append(
            contiguous_copy(low_copy.layout[scale.name].offset, scale.offset, scale.nbytes)
        )
        second.append(contiguous_copy(remainder[spec.name].offset, spec.offset + half, half))
    both = (*first, *(replace(copy, source=copy.source + low_copy.stride) for copy in second))
    totals = {both: low_copy.stride + remainder.nbytes, tuple(second): remainder.nbytes}
    return NestedLayout(tuple(planes), tuple(first), totals), both, tuple(second)


def contiguous_copy(source: int, target: int, nbytes: int) -> Copy:
    """A run of bytes."""
    return Copy(source, target, (1, nbytes), (nbytes, 1), (nbytes, 1), "uint8", "uint8")


def join_planes(high: Tensor, remainder: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 codes, scales) of planes and the copy's scale: the reference for what slots hold."""
    codes = (nibbles(high).short() - 8) * STEP + nibbles(remainder).short() - 8
    return codes.to(torch.int8), scale / STEP
