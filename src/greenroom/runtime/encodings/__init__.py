"""Encodings of quantised matrices: a table from each encoding's name to its decoder.

A decoder is the reference for every kernel that reads the same bytes in place. Each value equals
that of transformers' (or gguf's) own dequantisation in the model's dtype, bit for bit. Decoders
compute in float32, rounding after every operation (never fused), and round to the model's dtype at
the end (affine encodings first to the dtype of their scales).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from greenroom.core.layout import MIXED, SECOND, WeightSpec
from greenroom.runtime.encodings import affine, bf12, fp4, fp8, ggml, packed
from greenroom.runtime.encodings.encoding import Encoding

ENCODINGS: dict[str, Encoding] = {
    encoding.name: encoding
    for family in (ggml, fp4, fp8, bf12, packed, affine)
    for encoding in family.ENCODINGS
}


def companions(name: str) -> tuple[str, ...]:
    """Return the names of an encoding's companion tensors; of a mixed one, the codes of up."""
    return (SECOND,) if MIXED in name else ENCODINGS[name].companions


def decode(weight: WeightSpec, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Decode a quantised matrix, of which gate and up projection may have different encodings.

    `parts` are the tensors of `weight.parts`.
    """
    if MIXED not in weight.encoding:
        return ENCODINGS[weight.encoding].decode(parts, weight.shape, dtype)
    halves = zip(weight.halves, parts, strict=True)
    return torch.cat([decode(half, [codes], dtype) for half, codes in halves])


__all__ = ["ENCODINGS", "Encoding", "companions", "decode"]
