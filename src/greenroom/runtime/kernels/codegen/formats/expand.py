"""LLVM code that decodes 32 quantised weights of a row in registers.

The `Expander` of an encoding decodes a weight bit for bit as the decoder in runtime/encodings. It
first writes all scales of a row as float32 (`prepare`), and then decodes 32 weights of the row at a
time (`group`), rounded to the model's type. 4-bit weights are looked up in a table of their 16
values, which is rounded once for the 32 weights of a group instead of for each weight.

Rounding to bfloat16 is done in float32: adding 1.5 * 2^16 times its own power of two to a number
leaves 8 significant bits, ties to even. That is right for zeros and for numbers from 2^-126 to
2^110, and a model's weights are such numbers.

This module has what several encodings share; the encodings are in families/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from greenroom.runtime.kernels.codegen.formats.scales import Row
from greenroom.runtime.kernels.codegen.llvm.target import LANES
from greenroom.runtime.kernels.codegen.llvm.values import (
    F16,
    F16_KIND,
    F32,
    F32_KIND,
    I8,
    I16,
    I32,
    NATURAL,
    Value,
)

GROUP = 32  # inputs expanded at a time
STARTS = range(0, GROUP, LANES)  # first input of each vector of a group
# Lanes alternate between two int32 of eight 4-bit codes each.
PAIRED = tuple(i // 2 + 8 * (i % 2) for i in range(16)) if LANES == 16 else NATURAL
TABLE = LANES == 16  # does one vector hold a table of 16 values?
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*E2M1, *(-value for value in E2M1))
TWICE_E2M1 = tuple(int(2 * value) for value in E2M1)

CodesAt = Callable[[Row, Value, int], list[Value]]  # 32 codes in the low bits of int32
Group = Callable[[Any, Row, Value, int], list[Value]]


@dataclass(frozen=True, slots=True)
class Expander:
    """LLVM code that decodes the quantised weights of one encoding.

    prepare: function of a row that writes the row's scales as float32
    group:   function of (kind, row, at, half) that returns 32 weights, from input at + 32 * half
             on, as vectors of LANES float32; `at` (int64) is a multiple of 64, `half` is 0 or 1
    order:   index of the weight in each lane
    """

    prepare: Callable[[Row], None]
    group: Group
    order: tuple[int, ...] = NATURAL


def to_model(kind: Any, value: Value) -> Value:
    """Round a float32 vector to values of the model's data type.

    The values stay float32.
    """
    if kind == F32_KIND:
        return value
    if kind == F16_KIND:
        return value.convert(F16).convert(F32)
    power = (value.bitcast(I32) & -(1 << 23)).bitcast(F32)
    large = power.constant(98304.0)  # 1.5 * 2^16
    return power.fma(power.constant(-98304.0), power.fma(large, value))


def all_to_model(kind: Any, values: list[Value]) -> list[Value]:
    """Round float32 vectors to values of the model's data type."""
    return [to_model(kind, value) for value in values]


def looked_up(kind: Any, table: list[Value], codes: list[Value]) -> list[Value]:
    """Look up each lane's 4-bit code in a table of 16 weights.

    The table is one or two vectors. The weights are rounded to the model's type.
    """
    table = all_to_model(kind, table)
    if len(table) == 1:
        name = "llvm.x86.avx512.permvar.sf.512"
        return [table[0].call(name, table[0].ir.type, code) for code in codes]
    low, high = table
    return [
        high.select_lanes(code & 7).where((code << 28) < 0, low.select_lanes(code & 7))
        for code in codes
    ]


def scaled_bytes(kind: Any, codes: Value, scale: Value) -> list[Value]:
    """Multiply 32 signed bytes by a scale, and round to the model's type."""
    read = ((codes + start).load(I8, LANES).convert(I32, signed=True) for start in STARTS)
    return all_to_model(kind, [code.convert(F32, signed=True) * scale for code in read])


def affine(kind: Any, codes: list[Value], scale: Value, offset: Value) -> list[Value]:
    """Decode 4-bit codes with a scale and an offset: scale * (code & 15) + offset.

    The weight is rounded to the model's type.
    """
    if TABLE:
        table = scale.fma(scale.constant([float(i) for i in range(16)]), offset)
        return looked_up(kind, [table], codes)
    return all_to_model(kind, [scale.fma((code & 15).convert(F32), offset) for code in codes])


def around(
    first: Any, kind: Any, codes: list[Value], scale: Value, zero: Value | float
) -> list[Value]:
    """Decode 4-bit codes around a zero: scale * ((code & 15) - zero).

    The weight is rounded to the type `first`, then to the model's type.
    """
    if TABLE:
        table = scale * (scale.constant([float(i) for i in range(16)]) - zero)
        return looked_up(kind, [to_model(first, table)], codes)
    values = [scale * ((code & 15).convert(F32) - zero) for code in codes]
    return all_to_model(kind, all_to_model(first, values))


def symmetric(codes_at: CodesAt, kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """Decode 4-bit codes with a scale: scale * (code - 8), rounded to the model's type."""
    return around(F32_KIND, kind, codes_at(row, at, half), row.scale_at(at, 5, half), 8.0)


def from_table(
    codes_at: CodesAt,
    table: Sequence[float],
    kind: Any,
    row: Row,
    at: Value,
    half: int,
    *,
    exact: tuple[Any, ...] = (),
    scaled: bool = False,
    shift: int = 5,
) -> list[Value]:
    """Decode 4-bit codes with a table of 16 values and a scale: scale * table[code].

    Weights are rounded to the model's type, unless it is one of `exact`, which represent them. A
    row has one scale for 2^shift inputs, 16 or 32. `scaled`: each weight is then multiplied by the
    row's first minimum.
    """
    codes, values = codes_at(row, at, half), []
    for start in range(0, GROUP, 1 << shift):
        scale = row.scale_at(at, shift, half, start=start)
        parts = [scale * [float(v) for v in table[i : i + LANES]] for i in range(0, 16, LANES)]
        if scaled:
            parts = [part * row.minima.load(F32).broadcast() for part in parts]
        mine = [
            code
            for code, first in zip(codes, STARTS, strict=True)
            if first >> shift == start >> shift
        ]
        values += looked_up(F32_KIND if kind in exact else kind, parts, mine)
    return values


def bits_at(address: Value, shift: Value, mask: int) -> Value:
    """Extract a bit field from each of 32 bytes: (byte >> shift) & mask.

    Vectors shift int16, so bits of the neighbouring byte come in; the mask removes them.
    """
    pairs = address.load(I16, GROUP // 2) >> shift.convert(I16)
    return pairs.bitcast(I8) & mask


def shifted(small: Value) -> Value:
    """Shift each byte of a vector to the left by 4; bytes must be below 16."""
    return (small.bitcast(I16) << 4).bitcast(I8)


def sliced(codes: Value) -> list[Value]:
    """Split 32 elements into vectors of LANES elements."""
    return [codes.shuffle(range(start, start + LANES)) for start in STARTS]
