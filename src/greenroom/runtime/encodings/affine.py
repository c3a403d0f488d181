"""Affine encodings: integer codes in groups, with a scale and a zero for each group of a row.

AWQ, GPTQ and compressed-tensors store integers so; other layouts of their bytes are rearranged
when a matrix is read (runtime/slots/forms.py). Shapes are of a matrix of `rows` outputs and
`columns` inputs; BITS is 4 or 8.

symmetricBITS: codes and scale; all zeros are half of the range of codes: 8, or 128 (0 for int8)
affineBITS:    codes, scale and zero
indexedBITS:   codes, scale, zero and index; inputs are in groups in any order (GPTQ's "act order")

codes:  4 bits: int32 [rows, columns / 8], eight values from the lowest bits up: the same bytes as
        those of `int4`. 8 bits: int32 [rows, columns / 4] with four values, or int8 [rows, columns]
.scale: float32, bfloat16 or float16 [rows, groups]
.zero:  uint8 [rows, groups]; int8 if the codes are
.index: int32 [n, columns], the group of each input; each of n equal runs of rows has its own
value:  scale * (code - zero), rounded to the scale's dtype and then to the model's. The references
        are compressed-tensors' `dequantize`, GPTQModel's `dequantize_weight` and AutoAWQ's
        `dequantize_gemm`
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from greenroom.runtime.encodings.encoding import Encoding, nibbles


def expand(
    bits: int,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    index: Tensor | None = None,
) -> Tensor:
    """Decode codes in groups, with scales and zeros, to weights in the scales' dtype.

    The result is [rows, columns], or [rows, groups, columns / groups] without `index`.
    """
    signed = codes.dtype is torch.int8
    raw = codes if signed else codes.view(torch.uint8)
    values = (nibbles(raw) if bits == 4 else raw).float()
    middle = torch.full_like(scale, 0 if signed else 1 << (bits - 1), dtype=torch.float32)
    zeros, scales = middle if zero is None else zero.float(), scale.float()
    if index is None:
        values = values.unflatten(1, (scale.shape[1], -1))
        return ((values - zeros[..., None]) * scales[..., None]).to(scale.dtype)
    groups = index.long().repeat_interleave(len(codes) // len(index), 0)
    return ((values - zeros.gather(1, groups)) * scales.gather(1, groups)).to(scale.dtype)


KINDS = {
    "symmetric": ("scale",),
    "affine": ("scale", "zero"),
    "indexed": ("scale", "zero", "index"),
}
ENCODINGS = tuple(
    Encoding(f"{kind}{bits}", partial(expand, bits), companions)
    for kind, companions in KINDS.items()
    for bits in (4, 8)
)
