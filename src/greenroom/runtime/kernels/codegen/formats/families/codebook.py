"""GGUF encodings that store runs of weights as indices into a codebook, and tq2_0.

The codebooks are constant tables in the compiled code: one int64 is an entry of 8 weights, one
int32 an entry of 4. Entries are small integers, so a weight is an integer times a float32 scale,
exact until it is rounded to the model's type. runtime/encodings/ggml/codebook.py has the layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from greenroom.runtime.codebooks import codebook
from greenroom.runtime.kernels.codegen.formats.expand import (
    STARTS,
    Expander,
    all_to_model,
    bits_at,
    sliced,
)
from greenroom.runtime.kernels.codegen.formats.format import Format
from greenroom.runtime.kernels.codegen.formats.scales import Row
from greenroom.runtime.kernels.codegen.llvm.constants import constant_table
from greenroom.runtime.kernels.codegen.llvm.values import (
    F16_KIND,
    F32,
    I1,
    I8,
    I16,
    I32,
    I64,
    Value,
    counted_loop,
)

RUNS = [i // 8 for i in range(32)]  # of 8 weights
Codes = Callable[[Row, Value, int], Value]  # 32 weights as int8, before their scale

# Codebooks and signs.


def in_super_block(row: Row, at: Value, width: int) -> tuple[Value, Value]:
    """Find the GGUF block of 256 inputs, and the block's quarter, with input `at`.

    Blocks have `width` bytes. Return (address of the block, number of the quarter: 0 to 3).
    """
    return row.codes + (at >> 8) * width, (at >> 6) & 3


def entries(name: str, index: Sequence[Value], factor: int = 1) -> Value:
    """Look up 32 weights, times `factor`, in a type's codebook: 4 entries of 8, or 8 of 4."""
    element = I64 if len(index) == 4 else I32
    grid = (codebook(name) * factor).astype(np.int8)
    packed = grid.view(np.int64 if element is I64 else np.int32)
    table = constant_table(index[0], f"{name}.{factor}", element, packed.ravel().tolist())
    places = (table + (each << (3 if element is I64 else 2)) for each in index)
    return _vector([place.load(element) for place in places]).bitcast(I8)


def _vector(scalars: Sequence[Value]) -> Value:
    """Put scalars into the lanes of a vector."""
    vector = scalars[0].broadcast(len(scalars))
    for i, scalar in enumerate(scalars[1:], start=1):
        vector = vector.with_lane(i, scalar)
    return vector


def bytes_at(address: Value, count: int) -> list[Value]:
    """Load consecutive bytes as int64."""
    return [(address + i).load(I8).convert(I64) for i in range(count)]


def fields(word: Value, shifts: Sequence[int], mask: int) -> list[Value]:
    """Extract bit fields of an integer as int64."""
    wide = word.convert(I64) if word.element != I64 else word
    return [(wide >> shift) & mask for shift in shifts]


def signed(weights: Value, signs: Value) -> Value:
    """Negate the weights whose bits in four bytes of signs are set."""
    return (0 - weights).where(signs.bitcast(I1), weights)


def sign_bytes(sevens: Sequence[Value]) -> Value:
    """Complete sign fields of seven bits: the eighth is set if an odd number of others is."""
    bytes_ = [i | (i.bit_count() & 1) << 7 for i in range(128)]
    table = constant_table(sevens[0], "signs", I8, bytes_)
    return _vector([(table + seven).load(I8) for seven in sevens])


# Weights without their scales.


def iq2_xxs(row: Row, at: Value, half: int) -> Value:
    """Load 32 signed codes of GGUF iq2_xxs."""
    block, part = in_super_block(row, at, 66)
    base = block + (part << 4) + (2 + 8 * half)
    signs = sign_bytes(fields((base + 4).load(I32), range(0, 28, 7), 127))
    return signed(entries("iq2_xxs", bytes_at(base, 4)), signs)


def iq2_xs(row: Row, at: Value, half: int) -> Value:
    """Load 32 signed codes of GGUF iq2_xs."""
    block, part = in_super_block(row, at, 74)
    packed = (block + (part << 4) + (2 + 8 * half)).load(I64)
    index, signs = fields(packed, range(0, 64, 16), 511), fields(packed, range(9, 64, 16), 127)
    return signed(entries("iq2_xs", index), sign_bytes(signs))


def iq2_s(row: Row, at: Value, half: int) -> Value:
    """Load 32 signed codes of GGUF iq2_s."""
    block, part = in_super_block(row, at, 82)
    base, high = block + (part << 3) + (2 + 4 * half), block + (part << 1) + (66 + half)
    above = fields(high.load(I8), range(0, 8, 2), 3)
    index = [low | (two << 8) for low, two in zip(bytes_at(base, 4), above, strict=True)]
    return signed(entries("iq2_s", index), (base + 32).load(I8, 4))


def iq3_xxs(row: Row, at: Value, half: int) -> Value:
    """Load 32 signed codes of GGUF iq3_xxs."""
    block, part = in_super_block(row, at, 98)
    word = (block + (part << 3) + (66 + 4 * half)).load(I32)
    weights = entries("iq3_xxs", bytes_at(block + (part << 4) + (2 + 8 * half), 8))
    return signed(weights, sign_bytes(fields(word, range(0, 28, 7), 127)))


def iq3_s(row: Row, at: Value, half: int) -> Value:
    """Load 32 signed codes of GGUF iq3_s."""
    block, part = in_super_block(row, at, 110)
    above = fields((block + (part << 1) + (66 + half)).load(I8), range(8), 1)
    low = bytes_at(block + (part << 4) + (2 + 8 * half), 8)
    index = [a | (b << 8) for a, b in zip(low, above, strict=True)]
    return signed(entries("iq3_s", index), (block + (part << 3) + (74 + 4 * half)).load(I8, 4))


def iq1_s(row: Row, at: Value, half: int) -> Value:
    """Load 32 codes of GGUF iq1_s: eight times the codebook's values, plus or minus one."""
    block, part = in_super_block(row, at, 50)
    word = (block + (part << 2) + (34 + 2 * half)).load(I16)
    low, above = bytes_at(block + (part << 3) + (2 + 4 * half), 4), fields(word, range(0, 12, 3), 7)
    index = [a | (b << 8) for a, b in zip(low, above, strict=True)]
    one = 1 - ((word >> 15).convert(I8) << 1)
    return entries("iq1_s", index, 8) + one.broadcast(32)


def iq1_m(row: Row, at: Value, half: int) -> Value:
    """Load 32 codes of GGUF iq1_m: eight times the codebook's values, plus or minus one."""
    block, part = in_super_block(row, at, 56)
    word = (block + (part << 2) + (32 + 2 * half)).load(I16)
    low, above = bytes_at(block + (part << 3) + 4 * half, 4), fields(word, range(0, 16, 4), 7)
    index = [a | (b << 8) for a, b in zip(low, above, strict=True)]
    bits = ((word.broadcast(4) >> (3, 7, 11, 15)) & 1).convert(I8)
    return entries("iq1_m", index, 8) + (1 - (bits << 1)).shuffle(RUNS)


def tq2_0(row: Row, at: Value, half: int) -> Value:
    """Load 32 codes of GGUF tq2_0: -1, 0 and 1."""
    block, part = in_super_block(row, at, 66)
    return bits_at(block + ((part >> 1) << 5), ((part & 1) << 2) + 2 * half, 3) - 1


# Scales.


def nibbles(address: Value, count: int) -> Value:
    """Load `count` four-bit integers as int32, the low half of a byte first."""
    pairs = address.load(I8, count // 2).convert(I32)
    return (pairs.shuffle([i // 2 for i in range(count)]) >> ([0, 4] * (count // 2))) & 15


def _top_bits(offset: int, step: int) -> Callable[[Value], Value]:
    """Make a function that reads the highest four bits of 8 int32, `step` int32 apart."""

    def read(block: Value) -> Value:
        last = [step * i + step - 1 for i in range(8)]
        return (block + offset).load(I32, 8 * step).shuffle(last) >> 28

    return read


def _three_bits(block: Value) -> Value:
    """Read the 16 scales of a block of GGUF iq1_m."""
    packed = (block + 48).load(I16, 4).convert(I32)
    return (packed.shuffle([i // 4 for i in range(16)]) >> ([0, 3, 6, 9] * 4)) & 7


def _quarters(block: Value) -> Value:
    """Read the float16 of a block of GGUF iq1_m, whose quarters are in four int16."""
    packed = (block + 48).load(I16, 4)
    first, *others = ((packed.lane(i) >> 12) << 4 * i for i in range(4))
    for quarter in others:
        first = first | quarter
    return first


def prepare(
    width: int,
    small: Callable[[Value], Value],
    slope: float,
    start: float,
    d: Callable[[Value], Value],
    row: Row,
) -> None:
    """Write the scales of a row: d * (slope * s + start), for 8 or 16 integers s of a block.

    width: bytes of a block; small, d: functions of a block's address that read s, and the bits of d
    """
    with counted_loop(0, row.inputs >> 8) as number:
        block = row.codes + number * width
        s = small(block).convert(F32)
        scales = (s * slope + start) * d(block).widened(F16_KIND)
        row.put(number * (s.lanes or 1), scales)


def _first_half(block: Value) -> Value:
    return block.load(I16)


def _last_half(block: Value) -> Value:
    """Read the float16 of a block of GGUF tq2_0."""
    return (block + 64).load(I16)


def _no_integers(block: Value) -> Value:
    return block.constant(0).convert(I32).broadcast(8)


def scaled(codes: Codes, shift: int, kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """Decode 32 weights: code times scale, of which a row has one for 2^shift inputs."""
    first, values = row.ready + ((at >> shift) << 2) + 4 * (32 * half >> shift), []
    for start, code in zip(STARTS, sliced(codes(row, at, half)), strict=True):
        scale = (first + 4 * (start >> shift)).load(F32).broadcast()
        values.append(code.convert(I32, signed=True).convert(F32, signed=True) * scale)
    return all_to_model(kind, values)


def _format(
    codes: Codes,
    width: int,
    small: Callable[[Value], Value],
    slope: float,
    start: float,
    *,
    shift: int = 5,
    d: Callable[[Value], Value] = _first_half,
) -> Format:
    scales = partial(prepare, width, small, slope, start, d)
    return Format(Expander(scales, partial(scaled, codes, shift)))


def _nibbles_at(offset: int, count: int) -> Callable[[Value], Value]:
    return lambda block: nibbles(block + offset, count)


FORMATS: dict[str, Format] = {
    "iq2_xxs": _format(iq2_xxs, 66, _top_bits(2, 2), 0.25, 0.125),
    "iq2_xs": _format(iq2_xs, 74, _nibbles_at(66, 16), 0.25, 0.125, shift=4),
    "iq2_s": _format(iq2_s, 82, _nibbles_at(74, 16), 0.25, 0.125, shift=4),
    "iq3_xxs": _format(iq3_xxs, 98, _top_bits(66, 1), 0.5, 0.25),
    "iq3_s": _format(iq3_s, 110, _nibbles_at(106, 8), 2.0, 1.0),
    "iq1_s": _format(
        iq1_s, 50, lambda block: ((block + 34).load(I16, 8).convert(I32) >> 12) & 7, 0.25, 0.125
    ),
    "iq1_m": _format(iq1_m, 56, _three_bits, 0.25, 0.125, shift=4, d=_quarters),
    "tq2_0": _format(tq2_0, 66, _no_integers, 0.0, 1.0, d=_last_half),
}
