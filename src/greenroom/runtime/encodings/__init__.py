"""Encodings of quantised matrices: a table from each encoding's name to its decoder.

A decoder is the reference for every kernel that reads the same bytes in place. Each value equals
that of transformers' (or gguf's) own dequantisation in the model's dtype, bit for bit. Decoders
compute in float32, rounding after every operation (never fused), and round to the model's dtype at
the end (`ct_int4` first to the dtype of its scales).
"""

from __future__ import annotations

from greenroom.runtime.encodings import compressed, fp4, fp8, ggml, packed
from greenroom.runtime.encodings.encoding import Encoding

ENCODINGS: dict[str, Encoding] = {
    encoding.name: encoding
    for family in (ggml, fp4, fp8, packed, compressed)
    for encoding in family.ENCODINGS
}

__all__ = ["ENCODINGS", "Encoding"]
