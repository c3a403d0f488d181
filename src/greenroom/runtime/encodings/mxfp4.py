"""`mxfp4`: the OCP microscaling format as gpt-oss stores it in safetensors.

codes:  uint8 [rows, columns / 2], two e2m1 values a byte, the low half first
.scale: uint8 [rows, columns / 32], e8m0: 2^(scale - 127)
value:  e2m1 * 2^(scale - 127), exact in float32 unless it overflows, rounded to the model's dtype;
        the reference is transformers' `convert_moe_packed_tensors`
"""

from __future__ import annotations

import torch
from torch import Tensor

from greenroom.runtime.encodings.encoding import Encoding, nibbles

E2M1 = (
    *(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
)


def expand(codes: Tensor, scale: Tensor) -> Tensor:
    """Decode mxfp4 codes and their block scales to weights, in float32.

    codes [rows, columns / 2], scale [rows, columns / 32] -> [rows, columns / 32, 32]
    """
    values = torch.tensor(E2M1, device=codes.device)[nibbles(codes).int()]
    power = scale.view(torch.float8_e8m0fnu).float()[..., None]
    return values.unflatten(1, (-1, 32)) * power


ENCODINGS = (Encoding("mxfp4", expand, ("scale",)),)
