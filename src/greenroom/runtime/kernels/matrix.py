"""Compiled products of encoded weight matrices, and checks of which matrices have one.

By default a weight has its format's value in float32: code times scale. Most formats multiply
integers (native/formats/panels.hpp): 32 inputs share a scale and are rounded to integers. Types of
GGUF take inputs of 8 bits, as ggml does: the error of an input is at most 1/254 of the largest of
its 32 neighbours. `kernels="precise"` gives them the 15 bits that other formats always have: inputs
are rounded only if they are below a 64th of the largest of their neighbours, to 2^-15 of that one.
This error is less than one rounding of the sum to 16 bits, and transformers' grouped_mm does one
such rounding more.

`kernels="rounded"` rounds weights to the model's type first, as transformers does when it
dequantises a checkpoint, and its products are bit for bit those of the decoded matrix. Weights of
int8 and q8_0 have up to 19 significant bits, weights of int4 and q4_0 up to 14; bfloat16 has 8. If
rounding changes no weight (`is_exact`), both ways have the same weights: MXFP4 in bfloat16 has two
significant bits times a power of two, and `rounded` is `precise`.
"""

from __future__ import annotations

import ctypes
from array import array
from typing import TYPE_CHECKING

import torch

from greenroom.core.layout import PLAIN, WeightSpec
from greenroom.runtime.encodings.packed import GROUP as PACKED
from greenroom.runtime.kernels.native.library import library

GROUP = 32  # inputs that are decoded at a time: rows are a multiple of them
PANEL = 16  # rows that are multiplied at a time (panel_order.py)
_AFFINE = {f"{kind}{bits}" for kind in ("symmetric", "affine", "indexed") for bits in (4, 8)}
# Inputs that share a scale, where the format fixes that.
_GROUPS = {**PACKED, "mxfp4": GROUP, "nvfp4": 16, "ct_nvfp4": 16}
# Formats of weights that are rounded to the model's type, as transformers does.
ROUNDED = (PLAIN, "bf12")
_NUMBERS = {(name, torch.bfloat16) for name in ("bf12", "mxfp4", "gguf_mxfp4", "gguf_nvfp4")}

if TYPE_CHECKING:
    from greenroom.runtime.kernels.layer import LayerExperts


class MatrixProduct:
    """The compiled code that multiplies a weight matrix, and its arguments for the matrix.

    arguments: addresses of the code and of the description of the matrix's layout
    planes: planes of bytes of an input row that is packed as integers (native/formats/inputs.hpp);
            0: input rows stay float32
    bfloat16: weights are of this type, or rounded to it, and multiplied by pairs
    """

    __slots__ = ("_layout", "_product", "arguments", "bfloat16", "planes")

    def __init__(
        self, weight: WeightSpec, dtype: torch.dtype, kernels: str = "native", first: int = 0
    ) -> None:
        """Choose a weight matrix's compiled product, and describe the matrix for kernels.

        dtype: the model's type
        kernels: native, precise or rounded
        first: the number that kernels give to the matrix's first row; not 0 only if the matrix is
               an up projection whose encoding is another than gate's
        """
        rows, columns = weight.shape
        values, *companions = weight.parts
        share, row_bytes = 1, values.nbytes // rows
        if companions:
            share = max(1, columns // companions[0].shape[1] // GROUP)
        # (first byte, bytes of a row, rows of codes to one) of scales and of two other tensors
        scale, other, index = [
            *((c.offset, c.nbytes // c.shape[0], rows // c.shape[0]) for c in companions),
            *[(values.offset, 0, 1)] * 3,
        ][:3]
        panel_rows = 0
        if values.panels:
            assert first % PANEL == 0, "panels begin at multiples of 16 rows"
            panel_rows = first + rows // PANEL * PANEL
        self._product = _format(weight, dtype, kernels)
        self._layout = array(
            "q",
            [
                *(values.offset - first * row_bytes, row_bytes, *scale[:2], share, scale[2]),
                *other,
                *index,
                panel_rows,
            ],
        )
        self.planes, self.bfloat16 = int(self._product.planes), bool(self._product.bfloat16)
        self.arguments = ctypes.addressof(self._product), self._layout.buffer_info()[0]


def is_exact(weight: WeightSpec, dtype: torch.dtype) -> bool:
    """Check that the model's data type represents every weight of an encoded matrix exactly."""
    return all((half.encoding, dtype) in _NUMBERS for half in weight.halves)


def products_of(weight: WeightSpec, dtype: torch.dtype, kernels: str) -> list[MatrixProduct]:
    """Return the compiled products of a matrix's first and second half of rows.

    Both are the same object, unless gate and up projection have different encodings.
    """
    if len(weight.halves) == 1:
        return [MatrixProduct(weight, dtype, kernels)] * 2
    gate, up = weight.halves
    return [
        MatrixProduct(gate, dtype, kernels),
        MatrixProduct(up, dtype, kernels, first=gate.shape[0]),
    ]


class Format(ctypes.Structure):
    """A format's planes, and the addresses of its code (native/formats/row.hpp)."""

    _fields_ = [
        ("planes", ctypes.c_int64),
        ("multiply", ctypes.c_void_p),
        ("expand", ctypes.c_void_p),
        ("arrange", ctypes.c_void_p),
        ("restore", ctypes.c_void_p),
        ("bfloat16", ctypes.c_int64),
        ("multiply_pairs", ctypes.c_void_p),
    ]


def _format(weight: WeightSpec, dtype: torch.dtype, kernels: str) -> Format:
    """Find the format that multiplies a matrix."""
    name, exact = format_name(weight), is_exact(weight, dtype)
    symbol = format_symbol(name)
    if name in ROUNDED or (kernels == "rounded" and not exact):
        symbol = format_symbol(name, dtype)
    elif kernels != "native" and library().address(f"{symbol}_precise"):
        symbol = f"{symbol}_precise"
    return Format.from_address(library().address(symbol))


def format_symbol(name: str, dtype: torch.dtype | None = None) -> str:
    """Return the symbol of a format in the library of kernels.

    dtype: type that weights are decoded and rounded to; None: they are used as they are
    """
    parts = ["format", name.replace(".", "_"), *([str(dtype)[6:]] if dtype else [])]
    return "_".join(parts)


def has_format(name: str) -> bool:
    """Check that compiled kernels have a format."""
    return library().address(format_symbol(name, torch.float32)) > 0


def has_precise_format(name: str) -> bool:
    """Check that a format's inputs have 8 bits by default, and 15 with `precise`."""
    return library().address(f"{format_symbol(name)}_precise") > 0


def format_name(weight: WeightSpec) -> str:
    """Return the name of a matrix's format."""
    if weight.encoding in _AFFINE:  # the types of codes and scales are parts of the name
        codes_type, scales_type = (part.dtype for part in weight.parts[:2])
        return f"{weight.encoding}.{'int8.' if codes_type == 'int8' else ''}{scales_type}"
    if weight.encoding == "int4" and weight.shape[1] // weight.parts[1].shape[1] != GROUP:
        return "int4.wide"  # groups of more than 32
    return weight.encoding


def fallback_reason(layer: LayerExperts) -> str:
    """Return why the CPU kernel cannot compute an MoE layer, or "" if it can.

    The reason is a noun, such as "fp8 with 100 inputs", which can follow "eager for".
    """
    weights = layer.up_weight, layer.down_weight
    encodings = {weight.encoding for weight in weights}
    if encodings == {PLAIN}:
        return ""
    if PLAIN in encodings and layer.transposed:
        return "layers with a transposed plain matrix and an encoded one"
    reasons = {unsupported_reason(half) for weight in weights for half in weight.halves} - {""}
    return " and ".join(sorted(reasons))


def unsupported_reason(weight: WeightSpec) -> str:
    """Return why no compiled product reads a weight matrix, or "" if one does.

    The reason is the encoding, with the size that does not fit if the encoding is known, such as
    "fp8 with 100 inputs".
    """
    name, (rows, columns) = format_name(weight), weight.shape
    if not has_format(name):
        return weight.encoding
    if columns % GROUP:
        return f"{weight.encoding} with {columns} inputs"
    if len(weight.parts) > 1:
        down, across = weight.parts[1].shape
        group = columns // across
        odd = across > 1 and (columns % across or group % _GROUPS.get(name, GROUP))
        others = any(rows % part.shape[0] for part in weight.parts[1:])
        if odd or others or _GROUPS.get(name, group) != group:
            of = f"{rows / down:g} x {columns / across:g} weights"
            return f"{weight.encoding} with scales for {of}"
    return ""
