"""Decoders of ggml's codebook types: an index stands for 4 or 8 weights.

All have blocks of 256 weights and a float16 d. Entry i of a type's codebook is `grid[i]`: 8 values
(4 for iq3). A type stores the signs of 8 weights as 8 bits, or as 7 bits: the eighth sign is set if
an odd number of the others is.

    iq2_xxs     d | 8 x (4 x u8 index, u32: four 7-bit signs, then 4 bits s)
                group of 32 weights: d * (s + 1/2) / 4 * sign * grid
    iq2_xs      d | 32 x u16: 9 bits index, 7-bit signs | 8 bytes: 16 x 4 bits s
                group of 16 weights: d * (s + 1/2) / 4 * sign * grid
    iq2_s       d | 32 x u8 index | 32 x u8 signs | 8 bytes: two high bits of each index |
                8 bytes: 16 x 4 bits s; groups as in iq2_xs
    iq3_xxs     d | 64 x u8 index | 8 x u32: four 7-bit signs, then 4 bits s
                group of 32 weights: d * (s + 1/2) / 2 * sign * grid
    iq3_s       d | 64 x u8 index | 8 bytes: the high bit of each index | 32 x u8 signs |
                4 bytes: 8 x 4 bits s; group of 32 weights: d * (1 + 2 s) * sign * grid
    iq1_s       d | 32 x u8 index | 8 x u16: 4 x 3 high bits of the index, 3 bits s, 1 bit b
                group of 32 weights: d * (2 s + 1) * (grid + 1/8, or - 1/8 if b is set)
    iq1_m       32 x u8 index | 16 bytes: 32 x (3 high bits of the index, 1 bit b) |
                4 x u16: 4 x 3 bits s, then 4 bits of d, from the lowest up
                group of 16 weights as in iq1_s, with one b for 8 weights

Products are exact in float32, so their order does not matter. gguf has the codebooks.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from greenroom.runtime.codebooks import codebook
from greenroom.runtime.encodings.encoding import nibbles
from greenroom.runtime.encodings.ggml.fields import bit_fields, read_half, read_integers


@cache
def grid(name: str, device: torch.device | None = None) -> Tensor:
    """Return a ggml type's codebook on a device, [entries, 8 or 4] float32.

    Raises UnsupportedModel if gguf is not installed.
    """
    return torch.from_numpy(codebook(name)).to(device)


@cache
def signs(bits: int, device: torch.device | None = None) -> Tensor:
    """Return the signs that fields of 7 or 8 bits stand for.

    The result is [2^bits, 8] float32, with the values 1 and -1.
    """
    fields = torch.arange(1 << bits, device=device)[:, None]
    ones = fields >> torch.arange(bits, device=device) & 1
    if bits == 7:
        ones = torch.cat((ones, ones.sum(1, keepdim=True) & 1), dim=1)
    return 1 - 2 * ones.float()


def _look_up(name: str, index: Tensor) -> Tensor:
    """Look up codebook entries: [n, m] -> [n, m, 8 or 4]."""
    return grid(name, index.device)[index.int()]


def _look_up_signed(name: str, index: Tensor, sign_bits: Tensor, bits: int) -> Tensor:
    """Look up codebook entries with signs: [n, 32 or 64] and [n, 32] -> [n, 32, 8]."""
    entries = _look_up(name, index).reshape(len(index), 32, 8)
    return entries * signs(bits, index.device)[sign_bits.int()]


def _scale_groups(scales: Tensor, values: Tensor) -> Tensor:
    """Multiply groups by their scales: [n, groups] and [n, 32, 8] -> [n, groups, weights]."""
    return scales[..., None] * values.reshape(*scales.shape, -1)


def _seven_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Split bytes of int32 into sign fields [n, 32] and four-bit scales [n, 8] float32."""
    fields = read_integers(packed, torch.int32)
    shift = torch.arange(0, 28, 7, device=packed.device)
    return (fields[..., None] >> shift & 127).flatten(1), (fields >> 28 & 15).float()


def _iq2_xxs(blocks: Tensor) -> Tensor:
    runs = blocks[:, 2:].reshape(len(blocks), 8, 8)
    sign_bits, scales = _seven_bits(runs[..., 4:].flatten(1))
    values = _look_up_signed("iq2_xxs", runs[..., :4].flatten(1), sign_bits, 7)
    return _scale_groups(read_half(blocks, 0) * (scales + 0.5) * 0.25, values)


def _iq2_xs(blocks: Tensor) -> Tensor:
    fields, scales = read_integers(blocks[:, 2:66], torch.int16), nibbles(blocks[:, 66:74]).float()
    values = _look_up_signed("iq2_xs", fields & 511, fields >> 9 & 127, 7)
    return _scale_groups(read_half(blocks, 0) * (scales + 0.5) * 0.25, values)


def _iq2_s(blocks: Tensor) -> Tensor:
    high, scales = bit_fields(blocks[:, 66:74], 1, 2, 4), nibbles(blocks[:, 74:82]).float()
    index = blocks[:, 2:34].int() | high.flatten(1).int() << 8
    values = _look_up_signed("iq2_s", index, blocks[:, 34:66], 8)
    return _scale_groups(read_half(blocks, 0) * (scales + 0.5) * 0.25, values)


def _iq3_xxs(blocks: Tensor) -> Tensor:
    sign_bits, scales = _seven_bits(blocks[:, 66:98])
    values = _look_up_signed("iq3_xxs", blocks[:, 2:66], sign_bits, 7)
    return _scale_groups(read_half(blocks, 0) * (scales + 0.5) * 0.5, values)


def _iq3_s(blocks: Tensor) -> Tensor:
    high, scales = bit_fields(blocks[:, 66:74], 1, 1, 8), nibbles(blocks[:, 106:110]).float()
    index = blocks[:, 2:66].int() | high.flatten(1).int() << 8
    values = _look_up_signed("iq3_s", index, blocks[:, 74:106], 8)
    return _scale_groups(read_half(blocks, 0) * (1 + 2 * scales), values)


def _look_up_shifted(name: str, blocks: Tensor, high: Tensor, minus: Tensor) -> Tensor:
    """Look up entries of iq1 types and add or subtract 1/8.

    blocks: bytes of low bits of the index [n, 32]; high: high bits [n, 32]; minus: is 1/8
    subtracted? [n, runs] -> [n, 32, 8]
    """
    values = _look_up(name, blocks.int() | high.int() << 8)
    delta = 0.125 - 0.25 * minus.float()
    return values + delta.repeat_interleave(32 // minus.shape[1], dim=1)[..., None]


def _iq1_s(blocks: Tensor) -> Tensor:
    fields = read_integers(blocks[:, 34:50], torch.int16).int()
    high = (fields[..., None] >> torch.arange(0, 12, 3, device=blocks.device) & 7).flatten(1)
    values = _look_up_shifted("iq1_s", blocks[:, 2:34], high, fields >> 15 & 1)
    return _scale_groups(read_half(blocks, 0) * (2 * (fields >> 12 & 7) + 1), values)


def _iq1_m(blocks: Tensor) -> Tensor:
    fields, four = read_integers(blocks[:, 48:56], torch.int16).int(), nibbles(blocks[:, 32:48])
    quarters = (fields >> 12 & 15) << torch.arange(0, 16, 4, device=blocks.device)
    d = quarters.sum(1, keepdim=True).to(torch.int16).view(torch.float16).float()
    scales = (fields[..., None] >> torch.arange(0, 12, 3, device=blocks.device) & 7).flatten(1)
    values = _look_up_shifted("iq1_m", blocks[:, :32], four & 7, four >> 3)
    return _scale_groups(d * (2 * scales + 1), values)


DECODERS = {
    "iq2_xxs": _iq2_xxs,
    "iq2_xs": _iq2_xs,
    "iq2_s": _iq2_s,
    "iq3_xxs": _iq3_xxs,
    "iq3_s": _iq3_s,
    "iq1_s": _iq1_s,
    "iq1_m": _iq1_m,
}
