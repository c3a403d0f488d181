"""Triton functions that look up the values of codes of IQ4_NL and IQ4_XS."""

from __future__ import annotations

import triton
import triton.language as tl

from greenroom.runtime.encodings.ggml.nonlinear import IQ4_VALUES

# The 16 values as signed bytes, four in an integer.
IQ4 = tuple(
    tl.constexpr(
        int.from_bytes(bytes(v & 255 for v in IQ4_VALUES[at : at + 4]), "little", signed=True)
    )
    for at in range(0, 16, 4)
)
_IQ4_0, _IQ4_1, _IQ4_2, _IQ4_3 = IQ4

if triton.knobs.runtime.interpret:  # the interpreter has no instructions of a GPU

    @triton.jit
    def pick_bytes(low, high, selector):
        """Pick bytes of `low` (0 to 3) and `high` (4 to 7) by four nibbles below 8."""
        picked = selector * 0
        for i in tl.static_range(4):
            number = (selector >> (4 * i)) & 7
            word = tl.where(number < 4, low, high)
            picked |= ((word >> (number % 4 * 8)) & 255) << (8 * i)
        return picked

else:
    from triton.language.extra import libdevice

    pick_bytes = libdevice.byte_perm  # the instruction PRMT


@triton.jit
def _values(packed, choice):
    """Look up the codes of the four lower nibbles; `choice` picks from both halves of the table."""
    negative = pick_bytes(_IQ4_0, _IQ4_1, packed)
    return pick_bytes(negative, pick_bytes(_IQ4_2, _IQ4_3, packed), choice)


@triton.jit
def look_up(packed):
    """Look up the values of the eight codes of words: two words of signed bytes.

    The first word has the values of the codes in bits 0, 4, 8 and 12, the second one the others.
    """
    number = packed & 0x77777777
    choice = ((packed >> 1) & 0x44444444) | 0x32103210
    return _values(number, choice), _values(number >> 16, choice >> 16)
