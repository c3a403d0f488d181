"""4-bit floats (e2m1) in groups of inputs with a scale: `mxfp4`, `nvfp4` and `ct_nvfp4`.

codes:  uint8 [rows, columns / 2], two e2m1 values a byte, the low half first

`mxfp4`, the OCP microscaling format:
.scale: uint8 or e8m0 [rows, columns / 32]: 2^(scale - 127)
value:  e2m1 * 2^(scale - 127), exact in float32 unless it overflows; the references are
        transformers' `convert_moe_packed_tensors` and `Fp8Dequantize`

`nvfp4`, NVIDIA's format, as ModelOpt stores it:
.scale: e4m3 [rows, columns / 16]
.matrix_scale: float32 [R, 1]; one scale covers rows / R outputs, which are one stored matrix
value:  e2m1 * (scale * matrix_scale); the reference is ModelOpt's `NVFP4QTensor.dequantize`, whose
        zeros are all positive

`ct_nvfp4`, the same as compressed-tensors stores it: the matrix scale divides
value:  e2m1 * (scale / matrix_scale); the reference is `NVFP4PackedCompressor.decompress`, whose
        results are always in bfloat16

Values are computed in float32 and rounded to the model's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from greenroom.runtime.encodings.encoding import Encoding, nibbles

E2M1 = (
    *(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
)


def mxfp4(codes: Tensor, scale: Tensor) -> Tensor:
    """Decode mxfp4 codes and their group scales to weights, in float32.

    codes [rows, columns / 2], scale [rows, columns / 32] -> [rows, columns / 32, 32]
    """
    return _scale_groups(codes, scale.view(torch.float8_e8m0fnu).float())


def nvfp4(codes: Tensor, scale: Tensor, matrix_scale: Tensor) -> Tensor:
    """Decode nvfp4 codes to weights, in float32; the matrix scale multiplies.

    codes [rows, columns / 2], scale [rows, columns / 16] -> [rows, columns / 16, 16]
    """
    return _scale_groups(codes, scale.float() * _repeat_scales(matrix_scale, len(scale)))


def ct_nvfp4(codes: Tensor, scale: Tensor, matrix_scale: Tensor) -> Tensor:
    """Decode compressed-tensors' nvfp4 codes to weights; the matrix scale divides.

    codes [rows, columns / 2], scale [rows, columns / 16] -> [rows, columns / 16, 16]
    """
    return _scale_groups(codes, scale.float() / _repeat_scales(matrix_scale, len(scale)))


def _repeat_scales(matrix_scale: Tensor, rows: int) -> Tensor:
    """Repeat the scales of matrices for each of their rows: [R, 1] -> [rows, 1]."""
    return matrix_scale.repeat_interleave(rows // len(matrix_scale), 0)


def _scale_groups(codes: Tensor, scale: Tensor) -> Tensor:
    """Multiply each group of a row's e2m1 values by its float32 scale."""
    values = torch.tensor(E2M1, device=codes.device)[nibbles(codes).int()]
    return values.unflatten(1, (scale.shape[1], -1)) * scale[..., None]


ENCODINGS = (
    Encoding("mxfp4", mxfp4, ("scale",)),
    Encoding("nvfp4", nvfp4, ("scale", "matrix_scale"), ("matrix_scale",)),
    Encoding("ct_nvfp4", ct_nvfp4, ("scale", "matrix_scale"), ("matrix_scale",)),
)
