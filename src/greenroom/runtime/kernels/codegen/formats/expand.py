"""How the weights of each encoding are expanded in registers: LLVM code for 32 inputs of a row.

`EXPANDERS` names them as runtime/encodings does; a value has the bits of that decoder's. An
expander first writes the scales of a whole row as float32 (`prepare`), which costs little there
and much beside the weights, and then gives 32 weights of the row at a time (`group`), rounded to
the model's type. 4-bit weights are looked up in a table of their 16 values, which is rounded once
for the 32 of a group instead of for each.

Rounding to bfloat16 is done in floats: adding 1.5 * 2^16 times its own power of two to a number
leaves 8 significant bits, ties to even. So numbers from 2^-126 to 2^110 and zeros are rounded
rightly; a model's weights lie between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from greenroom.runtime.kernels.codegen.formats.scales import (
    Row,
    contiguous,
    half_floats,
    half_powers,
    inside,
    nothing,
    powers,
    q6_scales,
    scales_and_minima,
    shared,
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

GROUP = 32  # inputs expanded together
STARTS = range(0, GROUP, LANES)  # of its vectors
# Two words of eight 4-bit codes each take turns in the lanes.
PAIRED = tuple(i // 2 + 8 * (i % 2) for i in range(16)) if LANES == 16 else NATURAL
TABLE = LANES == 16  # is there a look-up of 16 values?
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Group = Callable[[Any, Row, Value, int], list[Value]]


@dataclass(frozen=True, slots=True)
class Expander:
    """prepare: (row): write the row's scales
    group:   (kind, row, at, half) -> weights at + 32 half .. + 32, as vectors of LANES float32;
             `at` (int64) is a multiple of 64, half 0 or 1
    order:   which of LANES weights stands in each lane
    """

    prepare: Callable[[Row], None]
    group: Group
    order: tuple[int, ...] = NATURAL


def to_model(kind: Any, value: Value) -> Value:
    """float32 lanes rounded to the model's type, as float32."""
    if kind == F32_KIND:
        return value
    if kind == F16_KIND:
        return value.to(F16).to(F32)
    power = (value.bits(I32) & -(1 << 23)).bits(F32)
    large = power.constant(98304.0)  # 1.5 * 2^16
    return power.fma(power.constant(-98304.0), power.fma(large, value))


def all_to_model(kind: Any, values: list[Value]) -> list[Value]:
    return [to_model(kind, value) for value in values]


def looked_up(kind: Any, table: Value, codes: list[Value]) -> list[Value]:
    """table[code & 15], rounded, lane by lane; where TABLE is set."""
    table = to_model(kind, table)
    name = "llvm.x86.avx512.permvar.sf.512"
    return [table.call(name, table.ir.type, code) for code in codes]


def plain(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    size = SIZE[kind]
    codes = row.codes + at * size + 32 * size * half
    return [(codes + size * start).weights(kind) for start in STARTS]


def int8(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    return scaled_bytes(kind, row.codes + at + 32 * half, row.scale_at(at, 6, half))


def q8_0(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    codes = row.codes + at + (at >> 4) + (34 * half + 2)
    return scaled_bytes(kind, codes, row.scale_at(at, 5, half))


def scaled_bytes(kind: Any, codes: Value, scale: Value) -> list[Value]:
    """32 signed bytes times a scale."""
    read = ((codes + start).load(I8, LANES).to(I32, signed=True) for start in STARTS)
    return all_to_model(kind, [code.to(F32, signed=True) * scale for code in read])


def interleaved(row: Row, at: Value, half: int) -> list[Value]:
    """4-bit codes, two neighbours a byte -> int32 whose low four bits are the codes, `PAIRED`."""
    pairs = LANES == 16
    word, shifts = I64 if pairs else I32, [4 * (i // 2 if pairs else i) for i in NATURAL]
    places = (row.codes + (at >> 1) + (16 * half + start // 2) for start in STARTS)
    return [place.load(word).wide(8).bits(I32) >> shifts for place in places]


def block_codes(width: int, row: Row, at: Value, half: int) -> list[Value]:
    """The 16 bytes that end a block of 32 inputs and `width` bytes and hold codes i and i + 16 ->
    int32 whose low four bits are the codes."""
    base = row.codes + (at >> 5) * width + (width * (half + 1) - 16)
    read = [(base + start).load(I8, LANES).to(I32) for start in range(0, 16, LANES)]
    return read + [code >> 4 for code in read]


def q5_0(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """As q4_0, with the fifth bits of all 32 codes in the word before."""
    fifth = (row.codes + (at >> 5) * 22 + (22 * half + 2)).load(I32).wide()
    scale, values = row.scale_at(at, 5, half), []
    for start, four in zip(STARTS, block_codes(22, row, at, half), strict=True):
        high = (fifth >> [start + i for i in NATURAL]) & 1
        code = ((four & 15) | (high << 4)) - 16
        values.append(code.to(F32, signed=True) * scale)
    return all_to_model(kind, values)


def affine(
    kind: Any, codes: list[Value], scale: Value, offset: Value, first: Any = F32_KIND
) -> list[Value]:
    """scale * (code & 15) + offset, rounded to the type `first` and then to the model's."""
    if TABLE:
        table = scale.fma(scale.constant([float(i) for i in range(16)]), offset)
        return looked_up(kind, to_model(first, table), codes)
    values = [scale.fma((code & 15).to(F32), offset) for code in codes]
    return all_to_model(kind, all_to_model(first, values))


def symmetric(codes_at: Any, kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """Rounded scale * (code - 8)."""
    codes, scale = codes_at(row, at, half), row.scale_at(at, 5, half)
    if TABLE:
        return looked_up(kind, scale * [float(i - 8) for i in range(16)], codes)
    return affine(kind, codes, scale, scale * -8.0)


def microscaled(
    codes_at: Any, factor: float, kind: Any, row: Row, at: Value, half: int
) -> list[Value]:
    """e2m1 codes times factor * scale, a power of two: exact in bfloat16."""
    codes, scale = codes_at(row, at, half), row.scale_at(at, 5, half)
    kind = F32_KIND if kind == BF16_KIND else kind
    if TABLE:
        values = [factor * v for v in E2M1]
        return looked_up(kind, scale * [*values, *(-v for v in values)], codes)
    return all_to_model(kind, [scale * (e2m1(code) * factor) for code in codes])


def e2m1(code: Value) -> Value:
    """The low four bits as a float: in halves, m for exponent 0, (2 + m) 2^(e - 1) above."""
    e, m = (code >> 1) & 3, code & 1
    low = e.equals(0)
    whole = m.where(low, m | 2) << e.constant(0).where(low, e - 1)
    sign = (code & 8) << 28
    return ((whole.to(F32) * 0.5).bits(I32) | sign).bits(F32)


def in_super_block(row: Row, at: Value, width: int) -> tuple[Value, Value]:
    """(address of the block of 256 inputs, which 64 of them begin at `at`)."""
    return row.codes + (at >> 8) * width, (at >> 6) & 3


def q4_k(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """32 bytes have 32 codes in their low halves, and the next 32 in their high halves."""
    block, part = in_super_block(row, at, 144)
    base = block + 16 + (part << 5)
    codes = [(base + start).load(I8, LANES).to(I32) for start in STARTS]
    codes = [code >> 4 for code in codes] if half else codes
    return affine(kind, codes, row.scale_at(at, 5, half), row.scale_at(at, 5, half, True))


def q5_k(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    block, part = in_super_block(row, at, 176)
    four = bits_at(block + 48 + (part << 5), part.constant(4 * half), 15)
    fifth = bits_at(block + 16, (part << 1) + half, 1)
    scale, low = row.scale_at(at, 5, half), row.scale_at(at, 5, half, True)
    codes = sliced(four | shifted(fifth))
    return all_to_model(kind, [scale.fma(code.to(I32).to(F32), low) for code in codes])


def q6_k(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    block, part = in_super_block(row, at, 210)
    side, turn = part >> 1, (part & 1) << 2
    four = bits_at(block + (side << 6) + 32 * half, turn, 15)
    two = bits_at(block + 128 + (side << 5), turn + 2 * half, 3)
    first, values = row.ready + ((at >> 4) << 2) + 8 * half, []
    for start, code in zip(STARTS, sliced((four | shifted(two)) - 32), strict=True):
        scale = (first + 4 * (start // 16)).load(F32).wide()
        values.append(code.to(I32, signed=True).to(F32, signed=True) * scale)
    return all_to_model(kind, values)


def bits_at(address: Value, shift: Value, mask: int) -> Value:
    """(byte >> shift) & mask of 32 bytes; vectors shift words of 16 bits, so bits come across."""
    words = address.load(I16, GROUP // 2) >> shift.to(I16)
    return words.bits(I8) & mask


def shifted(small: Value) -> Value:
    """Bytes shifted to the left by 4, that are small enough to stay bytes."""
    return (small.bits(I16) << 4).bits(I8)


def sliced(codes: Value) -> list[Value]:
    """32 elements -> vectors of LANES."""
    return [codes.pick(range(start, start + LANES)) for start in STARTS]


def fp8(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """e4m3: moved to where float16 has exponent and fraction it is the value over 2^8.

    One more in the place of the last bit carries into the exponent's highest bit for the code that
    is no number, and only for that: set there, that bit makes it float16's NaN.
    """
    scale = row.scale_at(at, 5, half)
    moved = ((row.codes + at + 32 * half).load(I8, GROUP).to(I16, signed=True) << 7) & -0x4001
    carried = (moved + 0x80) & 0x4000
    values = [number.bits(F16).to(F32) * scale for number in sliced(moved | carried)]
    return all_to_model(kind, values)


def ct_int4(first: Any, kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """As int4, but rounded to the scale's type first."""
    scale = row.scale_at(at, 5, half)
    return affine(kind, interleaved(row, at, half), scale, scale * -8.0, first)


def _of_scales(kind: Any) -> Expander:
    return Expander(shared(kind), partial(ct_int4, kind), PAIRED)


_INT4, _Q4_0 = (partial(symmetric, codes) for codes in (interleaved, partial(block_codes, 18)))
EXPANDERS: dict[str, Expander] = {
    "plain": Expander(nothing, plain),
    "int8": Expander(contiguous(6, I16, half_floats), int8),
    "int4": Expander(contiguous(5, I16, half_floats), _INT4, PAIRED),
    "mxfp4": Expander(contiguous(5, I8, powers), partial(microscaled, interleaved, 1.0), PAIRED),
    "fp8": Expander(shared(F32_KIND, 256.0), fp8),
    "q8_0": Expander(inside(34, I16, half_floats), q8_0),
    "q4_0": Expander(inside(18, I16, half_floats), _Q4_0),
    "q5_0": Expander(inside(22, I16, half_floats), q5_0),
    "gguf_mxfp4": Expander(
        inside(17, I8, half_powers), partial(microscaled, partial(block_codes, 17), 2.0)
    ),
    "q4_k": Expander(scales_and_minima(144), q4_k),
    "q5_k": Expander(scales_and_minima(176), q5_k),
    "q6_k": Expander(q6_scales, q6_k),
    "ct_int4.float32": _of_scales(F32_KIND),
    "ct_int4.bfloat16": _of_scales(BF16_KIND),
    "ct_int4.float16": _of_scales(F16_KIND),
    "int4.wide": Expander(shared(F16_KIND), _INT4, PAIRED),  # groups of more than 32
}
NAMES = tuple(EXPANDERS)  # kernels know an expander by its number here
