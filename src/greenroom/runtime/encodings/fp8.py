"""`fp8`: 8-bit floats with one scale for each block, row or matrix.

codes:  float8_e4m3fn [rows, columns]
.scale: float32 [R, C], in files also other floats; one scale covers a block of rows / R outputs
        and columns / C inputs, which are whole numbers. DeepSeek-V3's blocks have sides of 128, or
        all of a shorter side of the matrix; MXFP8's are one output and 32 inputs; a block may also
        be one output and all inputs, or a matrix. Gate and up have blocks of their own, so a gated
        matrix [2I, H] has twice as many rows of scales as [I, H], if blocks have several rows
value:  code * scale in float32, rounded to the model's dtype; the references are transformers'
        `Fp8Dequantize` and `CompressedTensorsDequantize`
"""

from __future__ import annotations

from torch import Tensor

from greenroom.runtime.encodings.encoding import Encoding


def expand(codes: Tensor, scale: Tensor) -> Tensor:
    """Decode fp8 codes and their block scales to weights, in float32.

    codes [rows, columns], scale [block rows, block columns] -> [block rows, rows a block, block
    columns, columns a block]
    """
    down, across = scale.shape
    blocks = codes.float().unflatten(1, (across, -1)).unflatten(0, (down, -1))
    return blocks * scale.float()[:, None, :, None]


ENCODINGS = (Encoding("fp8", expand, ("scale",), ("scale",)),)
