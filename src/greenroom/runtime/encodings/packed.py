"""`int8` and `int4`: Greenroom's symmetric integer encodings, with a scale per group of inputs.

int8:   codes int8 [rows, columns], groups of 64
int4:   codes uint8 [rows, columns / 2], two values a byte, the low half first, each stored as
        value + 8; groups of 32
.scale: float16 [rows, columns / group]
value:  scale * code in float32, rounded to the model's dtype
"""

from __future__ import annotations

from torch import Tensor

from greenroom.runtime.encodings.encoding import Encoding, nibbles

GROUP = {"int8": 64, "int4": 32}  # inputs that share a scale


def int8(codes: Tensor, scale: Tensor) -> Tensor:
    """Decode Greenroom's int8 codes and scales to weights, in float32.

    codes [rows, columns], scale [rows, groups] -> [rows, groups, columns / groups]
    """
    return scale_groups(codes.float(), scale.float())


def int4(codes: Tensor, scale: Tensor) -> Tensor:
    """Decode Greenroom's int4 codes and scales to weights, in float32.

    codes [rows, columns / 2], scale [rows, groups] -> [rows, groups, columns / groups]
    """
    return scale_groups(nibbles(codes).float() - 8, scale.float())


def scale_groups(codes: Tensor, scale: Tensor) -> Tensor:
    """Multiply each group of a row's values by the group's scale.

    codes [rows, columns], scale [rows, groups] -> [rows, groups, columns / groups]
    """
    return codes.unflatten(1, (scale.shape[1], -1)) * scale[..., None]


ENCODINGS = (Encoding("int8", int8, ("scale",)), Encoding("int4", int4, ("scale",)))
