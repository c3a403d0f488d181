"""How encoded matrices are expanded: a table from an encoding's name to what decodes it.

A decoder is the reference for every kernel that reads the same bytes in place: each value is the
one that transformers' (or gguf's) own dequantisation gives in the model's dtype, bit for bit. All
of them compute in float32, rounding after every operation (never fused), and round to the model's
dtype once, at the end.
"""

from __future__ import annotations

from greenroom.runtime.encodings import compressed, fp8, ggml, mxfp4, packed
from greenroom.runtime.encodings.encoding import Encoding

ENCODINGS: dict[str, Encoding] = {
    encoding.name: encoding
    for family in (ggml, mxfp4, fp8, packed, compressed)
    for encoding in family.ENCODINGS
}

__all__ = ["ENCODINGS", "Encoding"]
