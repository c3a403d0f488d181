"""`bf12`: bfloat16 in 12 bits, with the same values.

A float's exponent has 8 bits, but the weights of a matrix use few exponents. `bf12` stores the 16
most frequent ones of each matrix, and for each weight 4 bits for one of them.

codes:      uint8 [rows, 3/2 columns]: a byte for each weight, its sign (bit 7) and its mantissa
            (bits 0 to 6); then 4 bits for each weight, the number of its exponent, two weights a
            byte, the first in the low half. Each 64 weights are in the order `ORDER`; 32 at the end
            of a row are in their own
.ends:      int32 [rows, 1]: how many weights of a row, or of the rows before it, have exponents
            other than those 16
.exponents: uint8 [1, 16], ascending; without use 0
.escapes:   int32 [1, N]: those weights, row by row: column (bits 0 to 15), bfloat16 (bits 16 to 31)
value:      of the weight, bit for bit

Two bytes of a weight are joined by one instruction for many weights (native/formats/bf12.cpp), and
then weights in `ORDER` are in their natural order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from greenroom.runtime.encodings.encoding import Encoding, nibbles

SPAN = 64  # weights of a row that change places
UNIT = 32  # a row has a multiple of so many weights
LONGEST = 1 << 16  # columns of a matrix, at most
# The weight, of 64, in each place: of 16 places eight weights, and eight that lie 32 further.
ORDER = tuple(8 * (j // 16) + j % 8 + 32 * (j % 16 // 8) for j in range(SPAN))
_PLACES = torch.tensor(ORDER).argsort()
_ESCAPE_SHARE = 1024  # weights for which there is room for one escape


def escape_room(rows: int, columns: int) -> int:
    """Return how many escapes a matrix may have: 16, or one for 1,024 weights."""
    return max(16, rows * columns // _ESCAPE_SHARE)


def decode(codes: Tensor, ends: Tensor, exponents: Tensor, escapes: Tensor) -> Tensor:
    """Decode the codes of a matrix to weights, in bfloat16 [rows, columns]."""
    rows, columns = codes.shape[0], codes.shape[1] // 3 * 2
    first_bytes, numbers = codes[:, :columns].int(), nibbles(codes[:, columns:])
    exponent = exponents[0].int()[numbers.int()]
    bits = (first_bytes & 0x80) << 8 | exponent << 7 | first_bytes & 0x7F
    last = columns // SPAN * SPAN
    spans = bits[:, :last].unflatten(1, (-1, SPAN))[:, :, _PLACES.to(codes.device)].flatten(1)
    bits = torch.cat([spans, bits[:, last:]], 1)
    # Damaged ends and columns are as harmless here as in compiled kernels.
    last_of_row = ends[:, 0].clamp(0, escapes.shape[1]).cummax(0).values
    listed = escapes[0, : int(last_of_row[-1])]
    counts = last_of_row.diff(prepend=ends.new_zeros(1))
    row = torch.repeat_interleave(torch.arange(rows, device=codes.device), counts)
    column = listed.long() & 0xFFFF
    inside = column < columns
    bits[row[inside], column[inside]] = (listed >> 16 & 0xFFFF)[inside]
    # An int32 above 2^15 wraps to the int16 with the same bits.
    return bits.to(torch.int16).view(torch.bfloat16)


ENCODINGS = (Encoding("bf12", decode, ("ends", "exponents", "escapes")),)
