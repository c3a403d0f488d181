"""Decoders of ggml's nonlinear four-bit types: codes index a table of 16 integers.

iq4_nl      d f16 | 16 bytes: q[i], q[i + 16]      d * table[q]
iq4_xs      d f16 | 2 bytes: high pairs of 8 scales | 4 bytes: low halves, two a byte |
            128 bytes: 16 a group, as in iq4_nl
            group j of 32 weights: (d * (scale[j] - 32)) * table[q]
"""

from __future__ import annotations

import torch
from torch import Tensor

from greenroom.runtime.encodings.encoding import nibbles
from greenroom.runtime.encodings.ggml.fields import bit_fields, read_half

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _table(codes: Tensor) -> Tensor:
    return torch.tensor(IQ4_VALUES, dtype=torch.float32, device=codes.device)[codes.int()]


def _iq4_nl(blocks: Tensor) -> Tensor:
    return read_half(blocks, 0) * _table(bit_fields(blocks[:, 2:], 16, 4, 2).flatten(1))


def _iq4_xs(blocks: Tensor) -> Tensor:
    high = bit_fields(blocks[:, 2:4], 1, 2, 4).flatten(1)
    scales = (nibbles(blocks[:, 4:8]) | high << 4).float() - 32
    codes = bit_fields(blocks[:, 8:], 16, 4, 2).reshape(len(blocks), 8, 32)
    return (read_half(blocks, 0) * scales)[..., None] * _table(codes)


DECODERS = {"iq4_nl": _iq4_nl, "iq4_xs": _iq4_xs}
