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
        """Bytes of a low-precision copy, rounded up to blocks of 4096 bytes.

        The exact expert, or the remainder of a nested copy, begins there.
        """
        return -(-self.layout.nbytes // BLOCK) * BLOCK

    @property
    def remainder(self) -> SlotLayout:
        """The layout of a nested copy's remainder: the low 4 bits of each matrix's codes."""
        return SlotLayout.pack([(s.name, s.shape, s.dtype) for s in codes_of(self.layout)])

    def remainder_bytes(self, exact: SlotLayout) -> int:
        """Bytes that follow a low-precision copy: of the exact expert, or of the remainder.

        `exact` is the exact expert's layout. Only the remainder follows a nested copy.
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
    """Return how a nested low-precision copy and its remainder fill an expert's slot.

    The result has three parts: the layout of the two 4-bit planes in the slot, the byte copies of
    both planes, and the byte copies of the remainder alone.
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
    """Make the instruction that copies a run of file bytes to a memory slot unchanged."""
    return Copy(source, target, (1, nbytes), (nbytes, 1), (nbytes, 1), "uint8", "uint8")


def join_planes(high: Tensor, remainder: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Join the two 4-bit planes of a nested int4 copy to int8 codes and scales.

    high:      the codes of the int4 copy, two in a byte
    remainder: the low 4 bits of the int8 codes, two in a byte
    scale:     the scales of the int4 copy

    This is the reference for what the compiled code writes to memory slots.
    """
    codes = (nibbles(high).short() - 8) * STEP + nibbles(remainder).short() - 8
    return codes.to(torch.int8), scale / STEP
