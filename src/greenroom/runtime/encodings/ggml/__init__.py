"""Decoders of GGUF's block formats, in which rows are runs of ggml blocks.

The codes are uint8 [rows, row bytes]; scales lie inside the blocks. Layouts and arithmetic are
those of ggml's `dequantize_row_*` and of gguf's `quants.py`, which are the reference: everything
in float32, one rounding after each product and each difference.

`gguf_nvfp4_scaled` also has .matrix_scale, float32 [R, 1]: one scale for rows / R outputs, which
multiplies the weights.

A type needs its line in `BLOCKS` (core/layout.py) and its decoder in the `DECODERS` of a module of
this folder: a function from blocks [n, bytes], uint8, to weights of any shape, float32. Each module
describes its types: the fields of a block in their order, separated by | (f16 is a float16, u8 and
i8 are bytes without and with a sign), and the value of a weight with the code q.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from greenroom.core.layout import BLOCKS
from greenroom.runtime.encodings.encoding import Encoding
from greenroom.runtime.encodings.ggml import codebook, k_quants, nonlinear, simple, ternary


def _encoding(name: str, decode: Callable[[Tensor], Tensor]) -> Encoding:
    nbytes = BLOCKS[name][1]
    return Encoding(name, lambda codes: decode(codes.reshape(-1, nbytes)))


def _scaled(codes: Tensor, matrix_scale: Tensor) -> Tensor:
    """Decode blocks of NVFP4, and multiply each weight with the scale of its matrix."""
    values = DECODED["gguf_nvfp4"].expand(codes).view(len(codes), -1)
    return values * matrix_scale.repeat_interleave(len(codes) // len(matrix_scale), 0)


DECODED = {
    name: _encoding(name, decode)
    for family in (simple, k_quants, nonlinear, codebook, ternary)
    for name, decode in family.DECODERS.items()
}
ENCODINGS = (
    *DECODED.values(),
    Encoding("gguf_nvfp4_scaled", _scaled, ("matrix_scale",), ("matrix_scale",)),
)
