"""LLVM code that decodes 32 quantised weights of a row in registers.

`EXPANDERS` has the encodings of runtime/encodings, and decodes a weight bit for bit as the decoder
there. An `Expander` first writes all scales of a row as float32 (`prepare`), and then decodes 32
weights of the row at a time (`group`), rounded to the model's type. 4-bit weights are looked up in
a table of their 16 values, which is rounded once for the 32 weights of a group instead of for each
weight.

Rounding to bfloat16 is done in float32: adding 1.5 * 2^16 times its own power of two to a number
leaves 8 significant bits, ties to even. That is right for zeros and for numbers from 2^-126 to
2^110, and a model's weights are such numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from greenroom.runtime.kernels.codegen.formats.scales import (
    Row,
    contiguous,
    e8m0,
    e8m0_halves,
    half_floats,
    in_blocks,
    no_scales,
    q6_scales,
    repeated,
    scales_and_minima,
)
from greenroom.runtime.kernels.codegen.llvm.target import LANES
from greenroom.runtime.kernels.codegen.llvm.values import (
    BF16_KIND,
    F16,
    F16_KIND,
    F32,
    F32_KIND,
    I8,
    I16,
    I32,
    I64,
    NATURAL,
    SIZE,
    Value,
)

GROUP = 32  # inputs expanded at a time
STARTS = range(0, GROUP, LANES)  # first input of each vector of a group
# Lanes alternate between two int32 of eight 4-bit codes each.
PAIRED = tuple(i // 2 + 8 * (i % 2) for i in range(16)) if LANES == 16 else NATURAL
TABLE = LANES == 16  # is there a look-up of 16 values?
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

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


def looked_up(kind: Any, table: Value, codes: list[Value]) -> list[Value]:
    """Look up each lane's 4-bit code in a table of 16 weights.

    The weights are rounded to the model's type. Needs AVX-512.
    """
    table = to_model(kind, table)
    name = "llvm.x86.avx512.permvar.sf.512"
    return [table.call(name, table.ir.type, code) for code in codes]


def plain(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """Load 32 unencoded weights of a row as float32."""
    size = SIZE[kind]
    codes = row.codes + at * size + 32 * size * half
    return [(codes + size * start).weights(kind) for start in STARTS]


def int8(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """Decode int8 weights: code times scale, one scale for 64 inputs."""
    return scaled_bytes(kind, row.codes + at + 32 * half, row.scale_at(at, 6, half))


def q8_0(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """Decode GGUF q8_0 weights: code times scale, one scale for a block of 32 inputs."""
    codes = row.codes + at + (at >> 4) + (34 * half + 2)
    return scaled_bytes(kind, codes, row.scale_at(at, 5, half))


def scaled_bytes(kind: Any, codes: Value, scale: Value) -> list[Value]:
    """Multiply 32 signed bytes by a scale, and round to the model's type."""
    read = ((codes + start).load(I8, LANES).convert(I32, signed=True) for start in STARTS)
    return all_to_model(kind, [code.convert(F32, signed=True) * scale for code in read])


def interleaved(row: Row, at: Value, half: int) -> list[Value]:
    """Load 4-bit codes of which each byte holds two neighbours.

    The codes are the low bits of int32, in the order of lanes PAIRED.
    """
    pairs = LANES == 16
    word, shifts = I64 if pairs else I32, [4 * (i // 2 if pairs else i) for i in NATURAL]
    places = (row.codes + (at >> 1) + (16 * half + start // 2) for start in STARTS)
    return [place.load(word).broadcast(8).bitcast(I32) >> shifts for place in places]


def block_codes(width: int, row: Row, at: Value, half: int) -> list[Value]:
    """Load the 4-bit codes of a block of 32 inputs.

    The block has `width` bytes; its last 16 bytes hold codes i and i + 16 each. The codes are the
    low bits of int32.
    """
    base = row.codes + (at >> 5) * width + (width * (half + 1) - 16)
    read = [(base + start).load(I8, LANES).convert(I32) for start in range(0, 16, LANES)]
    return read + [code >> 4 for code in read]


def q5_0(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """Decode GGUF q5_0 weights.

    Their codes have four bits as in q4_0; an int32 before them has the fifth bits of all 32 codes.
    """
    fifth = (row.codes + (at >> 5) * 22 + (22 * half + 2)).load(I32).broadcast()
    scale, values = row.scale_at(at, 5, half), []
    for start, four in zip(STARTS, block_codes(22, row, at, half), strict=True):
        high = (fifth >> [start + i for i in NATURAL]) & 1
        code = ((four & 15) | (high << 4)) - 16
        values.append(code.convert(F32, signed=True) * scale)
    return all_to_model(kind, values)


def affine(
    kind: Any, codes: list[Value], scale: Value, offset: Value, first: Any = F32_KIND
) -> list[Value]:
    """Decode 4-bit codes with a scale and an offset: scale * (code & 15) + offset.

    The weight is rounded to the type `first`, then to the model's type.
    """
    if TABLE:
        table = scale.fma(scale.constant([float(i) for i in range(16)]), offset)
        return looked_up(kind, to_model(first, table), codes)
    values = [scale.fma((code & 15).convert(F32), offset) for code in codes]
    return all_to_model(kind, all_to_model(first, values))


def symmetric(codes_at: Any, kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """Decode 4-bit codes with a scale: scale * (code - 8), rounded to the model's type."""
    codes, scale = codes_at(row, at, half), row.scale_at(at, 5, half)
    if TABLE:
        return looked_up(kind, scale * [float(i - 8) for i in range(16)], codes)
    return affine(kind, codes, scale, scale * -8.0)


def microscaled(
    codes_at: Any, factor: float, kind: Any, row: Row, at: Value, half: int
) -> list[Value]:
    """Decode microscaled 4-bit floats (e2m1) with a power-of-two scale.

    The weight, code * factor * scale, is exact in bfloat16, so it is not rounded for bfloat16
    models.
    """
    codes, scale = codes_at(row, at, half), row.scale_at(at, 5, half)
    kind = F32_KIND if kind == BF16_KIND else kind
    if TABLE:
        values = [factor * v for v in E2M1]
        return looked_up(kind, scale * [*values, *(-v for v in values)], codes)
    return all_to_model(kind, [scale * (e2m1(code) * factor) for code in codes])


def e2m1(code: Value) -> Value:
    """Convert 4-bit floats (e2m1) in the low bits of lanes to float32.

    With the exponent bits e and the mantissa bit m, twice the value is m if e = 0, and
    (2 + m) * 2^(e - 1) otherwise.
    """
    e, m = (code >> 1) & 3, code & 1
    low = e.equals(0)
    halves = m.where(low, m | 2) << e.constant(0).where(low, e - 1)
    sign = (code & 8) << 28
    return ((halves.convert(F32) * 0.5).bitcast(I32) | sign).bitcast(F32)


def in_super_block(row: Row, at: Value, width: int) -> tuple[Value, Value]:
    """Find the GGUF block of 256 inputs, and the block's quarter, with input `at`.

    Blocks have `width` bytes. Return (address of the block, number of the quarter: 0 to 3).
    """
    return row.codes + (at >> 8) * width, (at >> 6) & 3


def q4_k(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """Decode GGUF q4_k weights.

    32 bytes hold 32 codes in their low four bits, and the next 32 codes in their high bits.
    """
    block, part = in_super_block(row, at, 144)
    base = block + 16 + (part << 5)
    codes = [(base + start).load(I8, LANES).convert(I32) for start in STARTS]
    codes = [code >> 4 for code in codes] if half else codes
    return affine(kind, codes, row.scale_at(at, 5, half), row.scale_at(at, 5, half, True))


def q5_k(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """Decode GGUF q5_k weights: four bits as in q4_k, and a fifth bit from 32 other bytes."""
    block, part = in_super_block(row, at, 176)
    four = bits_at(block + 48 + (part << 5), part.constant(4 * half), 15)
    fifth = bits_at(block + 16, (part << 1) + half, 1)
    scale, low = row.scale_at(at, 5, half), row.scale_at(at, 5, half, True)
    codes = sliced(four | shifted(fifth))
    return all_to_model(kind, [scale.fma(code.convert(I32).convert(F32), low) for code in codes])


def q6_k(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """Decode GGUF q6_k weights: codes of four bits and two bits, minus 32, times a scale."""
    block, part = in_super_block(row, at, 210)
    side, turn = part >> 1, (part & 1) << 2
    four = bits_at(block + (side << 6) + 32 * half, turn, 15)
    two = bits_at(block + 128 + (side << 5), turn + 2 * half, 3)
    first, values = row.ready + ((at >> 4) << 2) + 8 * half, []
    for start, code in zip(STARTS, sliced((four | shifted(two)) - 32), strict=True):
        scale = (first + 4 * (start // 16)).load(F32).broadcast()
        values.append(code.convert(I32, signed=True).convert(F32, signed=True) * scale)
    return all_to_model(kind, values)


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


def fp8(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """Decode fp8 (e4m3) weights by way of float16.

    Shifted to the place of float16's exponent and fraction, the code's bits are the float16 number
    weight / 2^8. Adding one to the last bit carries into the exponent's highest bit for the NaN
    code, and only for that; with the highest bit set the number is float16's NaN.
    """
    scale = row.scale_at(at, 5, half)
    moved = ((row.codes + at + 32 * half).load(I8, GROUP).convert(I16, signed=True) << 7) & -0x4001
    carried = (moved + 0x80) & 0x4000
    values = [number.bitcast(F16).convert(F32) * scale for number in sliced(moved | carried)]
    return all_to_model(kind, values)


def ct_int4(first: Any, kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """Decode compressed-tensors int4 weights: scale * (code - 8).

    Weights are rounded to `first`, the type of the scales, and then to the model's type.
    """
    scale = row.scale_at(at, 5, half)
    return affine(kind, interleaved(row, at, half), scale, scale * -8.0, first)


def _of_scales(kind: Any) -> Expander:
    return Expander(repeated(kind), partial(ct_int4, kind), PAIRED)


_INT4, _Q4_0 = (partial(symmetric, codes) for codes in (interleaved, partial(block_codes, 18)))
EXPANDERS: dict[str, Expander] = {
    "plain": Expander(no_scales, plain),
    "int8": Expander(contiguous(6, I16, half_floats), int8),
    "int4": Expander(contiguous(5, I16, half_floats), _INT4, PAIRED),
    "mxfp4": Expander(contiguous(5, I8, e8m0), partial(microscaled, interleaved, 1.0), PAIRED),
    "fp8": Expander(repeated(F32_KIND, 256.0), fp8),
    "q8_0": Expander(in_blocks(34, I16, half_floats), q8_0),
    "q4_0": Expander(in_blocks(18, I16, half_floats), _Q4_0),
    "q5_0": Expander(in_blocks(22, I16, half_floats), q5_0),
    "gguf_mxfp4": Expander(
        in_blocks(17, I8, e8m0_halves), partial(microscaled, partial(block_codes, 17), 2.0)
    ),
    "q4_k": Expander(scales_and_minima(144), q4_k),
    "q5_k": Expander(scales_and_minima(176), q5_k),
    "q6_k": Expander(q6_scales, q6_k),
    "ct_int4.float32": _of_scales(F32_KIND),
    "ct_int4.bfloat16": _of_scales(BF16_KIND),
    "ct_int4.float16": _of_scales(F16_KIND),
    "int4.wide": Expander(repeated(F16_KIND), _INT4, PAIRED),  # groups of more than 32
}
NAMES = tuple(EXPANDERS)  # kernels know an expander by its index here
