"""Low-precision copies in a pack, and their position next to the exact experts.

An expert's bytes begin with its copy, padded to complete blocks. The exact expert follows, or, for
nested copies, the remainder: the bits of the exact expert that the copy does not contain.
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
NESTED = "int8", "int4"  # the packed expert, and the copy that it contains


@dataclass(frozen=True, slots=True)
class LowPrecisionCopy:
    """The form of the low-precision copies of a layer's experts in a pack.

    `layout` is that of one copy.
    """

    precision: str
    nested: bool
    layout: SlotLayout

    @property
    def stride(self) -> int:
        """Bytes of a low-precision copy, rounded up to complete blocks.

        The expert or the remainder begins there.
        """
        return -(-self.layout.nbytes // BLOCK) * BLOCK

    @property
    def remainder(self) -> SlotLayout:
        """The layout of a nested copy's remainder: one plane for each matrix."""
        return SlotLayout.pack([(s.name, s.shape, s.dtype) for s in codes_of(self.layout)])

    def remainder_bytes(self, exact: SlotLayout) -> int:
        """Bytes that follow a low-precision copy: the exact expert, or the remainder."""
        return self.remainder.nbytes if self.nested else exact.nbytes


def codes_of(layout: SlotLayout) -> list[TensorSpec]:
    """Return an expert layout's tensors that are matrices or codes, without scales."""
    return [spec for spec in layout.tensors if "." not in spec.name]


def nested_copy_layout(exact: SlotLayout) -> SlotLayout:
    """Return the layout of low-precision copies that are nested in exact experts."""
    kind, precision = NESTED
    tensors = []
    for spec in codes_of(exact):
        rows, columns = spec.shape
        group = gcd(columns, GROUP[kind])
        tensors.append((spec.name, (rows, columns // 2), "uint8"))
        tensors.append((f"{spec.name}.scale", (rows, columns // group), "float16"))
    names = [spec.name for spec in codes_of(exact)]
    return SlotLayout.pack(tensors, dict.fromkeys(names, precision), exact.dtype)


def nested_slot_of(
    low_copy: LowPrecisionCopy, exact: SlotLayout
) -> tuple[NestedLayout, tuple[Copy, ...], tuple[Copy, ...]]:
    """Return how a nested low-precision copy and its remainder fill a slot.

    (how planes are joined, slot copies of both planes, slot copies of the remainder).
    """
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
    """Make the instruction that copies a run of bytes unchanged."""
    return Copy(source, target, (1, nbytes), (nbytes, 1), (nbytes, 1), "uint8", "uint8")


def join_planes(high: Tensor, remainder: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Join both planes of a nested int4 copy to int8 codes and scales.

    This is the reference for the values in slots.
    """
    codes = (nibbles(high).short() - 8) * STEP + nibbles(remainder).short() - 8
    return codes.to(torch.int8), scale / STEP
