"""How a compiled group is told of an encoded matrix, and which matrices it can be told of.

By default weights are what their format says, in float32: codes times scales. One token is
multiplied by whole numbers where the processor has them (codes.py): then only inputs below a 64th
of the largest of their 32 neighbours are rounded, to 2^-15 of that one, by less than a rounding of
the sum to 16 bits, where grouped_mm rounds once more.

`kernels="rounded"` rounds weights to the model's type first, as transformers does when it expands a
checkpoint, and has the bits of the expanded matrix's product. int8's and q8_0's weights have up to
19 significant bits, int4's and q4_0's up to 14, bfloat16 has 8. Where rounding changes no weight
(`exact`: MXFP4 in bfloat16, two bits times a power of two) there is nothing to do first.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import torch

from greenroom.core.layout import PLAIN, WeightSpec
from greenroom.runtime.encodings.packed import GROUP as PACKED
from greenroom.runtime.kernels.codegen.formats import codes, encoded, packing
from greenroom.runtime.kernels.codegen.formats.expand import GROUP, NAMES
from greenroom.runtime.kernels.launch.openmp import KernelEntry, kernel_entry

_GROUPS = {**PACKED, "mxfp4": GROUP}  # inputs that share a scale, where that is fixed
# Codes of 3 bits and a sign times a scale of 5 significant bits are exact in bfloat16. These bits
# of a float32 are 0 in such a scale.
_SHORT = dict.fromkeys(("int4", "int4.wide"), (1 << 19) - 1)
_NUMBERS = {(name, torch.bfloat16) for name in ("mxfp4", "gguf_mxfp4")}

if TYPE_CHECKING:
    from greenroom.runtime.kernels.layer import LayerExperts


class MatrixProduct:
    """The compiled product of an encoding and the words that it finds a matrix by.

    words: what the group's arguments hold: the product's address and that of the layout's words
    packs: does the product take x as integers?
    """

    __slots__ = ("_layout", "_product", "packs", "words")

    def __init__(self, weight: WeightSpec, dtype: torch.dtype, rounded: bool = False) -> None:
        """`rounded`: weights are rounded to `dtype`, the model's, as transformers expands them."""
        rows, columns = weight.shape
        values, share, together, scale_row = weight.parts[0], 1, 1, 0
        if len(weight.parts) > 1:
            down, across = weight.parts[1].shape
            share = max(1, columns // across // GROUP)
            together = rows // down
            scale_row = weight.parts[1].nbytes // down
        self._product, packed = _product(weight, dtype, rounded)
        self._layout = array(
            "q",
            [
                *(values.offset, values.nbytes // rows, weight.parts[-1].offset, scale_row),
                *(share, together, packed),
            ],
        )
        self.packs = packed > 0
        self.words = self._product.address, self._layout.buffer_info()[0]


def is_exact(weight: WeightSpec, dtype: torch.dtype) -> bool:
    """Are all weights of an encoded matrix numbers of the model's type?"""
    return (weight.encoding, dtype) in _NUMBERS


def _product(weight: WeightSpec, dtype: torch.dtype, rounded: bool) -> tuple[KernelEntry, int]:
    """(a matrix's product, bytes of a row of x that is packed for it)."""
    name = _name(weight)
    number = NAMES.index(name)
    if name == PLAIN or (rounded and not is_exact(weight, dtype)):
        mask = _SHORT.get(name, 0) if dtype is torch.bfloat16 else 0
        return kernel_entry(encoded.product, dtype, number, mask, False), 0
    if codes.INTEGERS and name in codes.INTEGER_PRODUCTS:
        packed = packing.packed_bytes(name, weight.shape[1])
        return kernel_entry(encoded.product, torch.float32, number, 0, True), packed
    return kernel_entry(encoded.product, torch.float32, number, 0, False), 0


def _name(weight: WeightSpec) -> str:
    """The name of a matrix's expander, where there is one."""
    if weight.encoding == "ct_int4":
        return f"ct_int4.{weight.parts[1].dtype}"
    if weight.encoding == "int4" and weight.shape[1] // weight.parts[1].shape[1] != GROUP:
        return "int4.wide"  # those that int8 contains
    return weight.encoding


def fallback_reason(layer: LayerExperts) -> str:
    """Why a layer's matrices are expanded one by one for eager's operations, or ""."""
    weights = layer.up_weight, layer.down_weight
    encodings = {weight.encoding for weight in weights}
    if encodings == {PLAIN}:
        return ""
    if PLAIN in encodings and layer.transposed:
        return "transposed matrices beside encoded ones"
    return next(filter(None, map(unsupported_reason, weights)), "")


def unsupported_reason(weight: WeightSpec) -> str:
    """Why no product reads a matrix [outputs, inputs], or ""."""
    name, (rows, columns) = _name(weight), weight.shape
    if name not in NAMES:
        return weight.encoding
    if columns % GROUP:
        return f"{weight.encoding} with {columns} inputs"
    if len(weight.parts) > 1:
        down, across = weight.parts[1].shape
        group = columns // across
        odd = across > 1 and (group % GROUP or columns % across)
        if odd or rows % down or _GROUPS.get(name, group) != group:
            of = f"{rows / down:g} x {columns / across:g} weights"
            return f"{weight.encoding} with scales for {of}"
    return ""
