"""`ct_int4`: the symmetric 4-bit encoding `pack-quantized` of compressed-tensors.

Shapes are of a matrix of `rows` outputs and `columns` inputs.

codes:  int32 [rows, columns / 8], eight values in each int32 from the lowest bits up, each stored
        as value + 8: the same bytes as those of `int4`
.scale: float32, bfloat16 or float16 [rows, columns / group]; the group size divides `columns`
value:  scale * code, rounded to the scale's dtype and then to the model's; the reference is
        `PackedQuantizationCompressor.decompress`, which transformers calls
"""

from __future__ import annotations

import torch
from torch import Tensor

from greenroom.runtime.encodings.encoding import Encoding, nibbles
from greenroom.runtime.encodings.packed import scale_groups


def expand(codes: Tensor, scale: Tensor) -> Tensor:
    """Decode codes and scales of `ct_int4` (compressed-tensors, 4 bits) to weights.

    codes [rows, columns / 8], scale [rows, groups] -> [rows, groups, columns / groups]
    """
    values = scale_groups(nibbles(codes.view(torch.uint8)).float() - 8, scale.float())
    return values.to(scale.dtype)


ENCODINGS = (Encoding("ct_int4", expand, ("scale",)),)
