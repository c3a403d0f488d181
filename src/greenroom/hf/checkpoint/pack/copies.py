"""Low-precision copies of experts in a pack, and their place next to the exact experts.

An expert's bytes in the pack begin with its low-precision copy, padded to blocks of 4096 bytes. The
exact expert follows. If the copy is nested, which means that it contains some bits of the exact
expert's codes, only the remainder follows: the other bits.
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

    precision: int8 or int4
    nested:    True if a copy contains the high bits of the exact expert's codes
    layout:    the layout of one copy
    """

    precision: str
    nested: bool
    layout: SlotLayout

    @property
    def stride(self) -> int:
        """Size in bytes of a low-precision copy, rounded up to blocks of 4096 bytes.

        At this offset the exact expert begins, or only the low 4 bits of its codes if the copy has
        their high bits.
        """
        return -(-self.layout.nbytes // BLOCK) * BLOCK

    @property
    def remainder(self) -> SlotLayout:
        """The layout of the low 4 bits of an expert's int8 codes.

        A nested int4 copy has the high bits of these codes.
        """
        return SlotLayout.pack([(s.name, s.shape, s.dtype) for s in codes_of(self.layout)])

    def remainder_bytes(self, exact: SlotLayout) -> int:
        """Return how many bytes of the exact expert follow its low-precision copy.

        `exact` is the layout of the exact expert, all of which follows. If the copy is nested (it
        has the high 4 bits of the expert's codes), only the low 4 bits of the codes follow.
        """
        return self.remainder.nbytes if self.nested else exact.nbytes


def codes_of(layout: SlotLayout) -> list[TensorSpec]:
    """Return the tensors of an expert's layout that are matrices or codes, without scales."""
    return [spec for spec in layout.tensors if "." not in spec.name]


def nested_copy_layout(exact: SlotLayout) -> SlotLayout:
    """Return the layout of int4 copies that are nested in int8 experts.

    `exact` is the layout of the int8 experts.
    """
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
    """Return how int8 experts that contain int4 copies are read into slots.

    The copy is the high 4 bits of the expert's codes, and the remainder is the low 4 bits. The
    result has three parts: the layout of both in the slot, the copy operations from file to slot
    for both, and those for the remainder alone.
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
    """Make the instruction that copies adjacent file bytes to a memory slot unchanged."""
    return Copy(source, target, (1, nbytes), (nbytes, 1), (nbytes, 1), "uint8", "uint8")


def join_planes(high: Tensor, remainder: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Join the high and low 4 bits of int8 codes; return the codes and their scales.

    high:      the codes of the int4 copy, which are the high 4 bits, two in a byte
    remainder: the low 4 bits of the int8 codes, two in a byte
    scale:     the scales of the int4 copy

    This is the reference for what the compiled code writes to memory slots.
    """
    codes = (nibbles(high).short() - 8) * STEP + nibbles(remainder).short() - 8
    return codes.to(torch.int8), scale / STEP
