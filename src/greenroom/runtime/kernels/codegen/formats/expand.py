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

from greenroom.runtime.kernels.codegen.formats.row import (
    BF16_KIND,
    F16_KIND,
    F32_KIND,
    GROUP,
    NATURAL,
    VECTORS,
    Builder,
    Row,
    Value,
    at_byte,
    bytes_at,
    constant,
    float_at,
    ready_at,
)
from greenroom.runtime.kernels.codegen.formats.scales import (
    contiguous,
    half_floats,
    half_power,
    halves,
    inside,
    nothing,
    powers,
    q6_scales,
    scales_and_minima,
    shared,
)
from greenroom.runtime.kernels.codegen.llvm.emit import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    SIZE,
    broadcast,
    fma,
    llvm_call,
    load,
    splat,
    vector_of,
)

# Two words of eight 4-bit codes each take turns in the lanes.
PAIRED = tuple(i // 2 + 8 * (i % 2) for i in range(16)) if LANES == 16 else NATURAL
TABLE = LANES == 16  # is there a look-up of 16 values?
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Expander:
    """prepare: (b, row): write the row's scales
    group:   (b, kind, row, at, half) -> weights at + 32 half .. + 32, `VECTORS` vectors of float32;
             `at` (int64) is a multiple of 64, half 0 or 1
    order:   which of LANES weights stands in each lane
    """

    prepare: Callable[[Builder, Row], None]
    group: Callable[[Builder, Any, Row, Value, int], list[Value]]
    order: tuple[int, ...] = NATURAL


def to_model(b: Builder, kind: Any, value: Value) -> Value:
    """float32 lanes rounded to the model's type, as float32."""
    if kind == F32_KIND:
        return value
    if kind == F16_KIND:
        return b.fpext(b.fptrunc(value, vector_of(F16, value.type.count)), value.type)
    bits = b.bitcast(value, vector_of(I32))
    power = b.bitcast(b.and_(bits, splat(-(1 << 23), bits.type)), value.type)
    large = splat(98304.0, value.type)  # 1.5 * 2^16
    return fma(b, power, splat(-98304.0, value.type), fma(b, power, large, value))


def look_up(b: Builder, table: Value, index: Value) -> Value:
    """table[index & 15] lane by lane; where TABLE is set."""
    return llvm_call(b, "llvm.x86.avx512.permvar.sf.512", table.type, [table, index])


def plain(b: Builder, kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    size = SIZE[kind]
    codes = at_byte(b, row.codes, b.mul(at, I64(size)), 32 * size * half)
    return [load(b, kind, at_byte(b, codes, size * LANES * i)) for i in range(VECTORS)]


def int8(b: Builder, kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    scale = ready_at(b, row, at, 6, half)
    codes = at_byte(b, row.codes, at, 32 * half)
    return scaled_bytes(b, kind, codes, scale)


def q8_0(b: Builder, kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    codes = at_byte(b, row.codes, at, b.lshr(at, I64(4)), 34 * half + 2)
    return scaled_bytes(b, kind, codes, ready_at(b, row, at, 5, half))


def scaled_bytes(b: Builder, kind: Any, codes: Value, scale: Value) -> list[Value]:
    """32 signed bytes times a scale."""
    read = (bytes_at(b, at_byte(b, codes, LANES * i), True) for i in range(VECTORS))
    return [to_model(b, kind, b.fmul(b.sitofp(code, scale.type), scale)) for code in read]


def interleaved(b: Builder, row: Row, at: Value, half: int) -> list[Value]:
    """4-bit codes, two neighbours a byte -> int32 whose low four bits are the codes, `PAIRED`."""
    word, count = (I64, 8) if LANES == 16 else (I32, 8)
    shifts = [4 * (i // 2 if LANES == 16 else i) for i in range(LANES)]
    found = []
    for i in range(VECTORS):
        address = at_byte(b, row.codes, b.lshr(at, I64(1)), 16 * half + LANES // 2 * i)
        raw = b.load(b.inttoptr(address, word.as_pointer()), align=1)
        wide = b.bitcast(broadcast(b, raw, count), vector_of(I32))
        found.append(b.lshr(wide, constant(shifts, I32)))
    return found


def halved(b: Builder, base: Value, half: int) -> list[Value]:
    """16 bytes that hold codes i and i + 16 -> int32 whose low four bits are the codes."""
    del half
    read = [bytes_at(b, at_byte(b, base, LANES * i)) for i in range(16 // LANES)]
    return read + [b.lshr(code, splat(4, code.type)) for code in read]


def affine(b: Builder, kind: Any, codes: list[Value], scale: Value, offset: Value) -> list[Value]:
    """Rounded scale * (code & 15) + offset, with one rounding to float32 before."""
    if TABLE:
        steps = constant([float(i) for i in range(16)])
        table = to_model(b, kind, fma(b, scale, steps, offset))
        return [look_up(b, table, code) for code in codes]
    masked = [b.and_(code, splat(15, code.type)) for code in codes]
    floats = [b.uitofp(code, scale.type) for code in masked]
    return [to_model(b, kind, fma(b, scale, code, offset)) for code in floats]


def symmetric(b: Builder, kind: Any, codes: list[Value], scale: Value) -> list[Value]:
    """Rounded scale * (code - 8)."""
    if TABLE:
        table = b.fmul(scale, constant([float(i - 8) for i in range(16)]))
        return [look_up(b, to_model(b, kind, table), code) for code in codes]
    return affine(b, kind, codes, scale, b.fmul(scale, splat(-8.0, scale.type)))


def microscaled(
    b: Builder, kind: Any, codes: list[Value], scale: Value, factor: float
) -> list[Value]:
    """e2m1 codes times factor * scale, a power of two: exact in bfloat16."""
    kind = F32_KIND if kind == BF16_KIND else kind
    if TABLE:
        values = [factor * v for v in E2M1]
        table = b.fmul(scale, constant([*values, *(-v for v in values)]))
        table = to_model(b, kind, table)
        return [look_up(b, table, code) for code in codes]
    return [
        to_model(b, kind, b.fmul(scale, b.fmul(e2m1(b, code), splat(factor, scale.type))))
        for code in codes
    ]


def e2m1(b: Builder, code: Value) -> Value:
    """The low four bits as a float: in halves, m for exponent 0, (2 + m) 2^(e - 1) above."""
    one = splat(1, code.type)
    e, m = b.and_(b.lshr(code, one), splat(3, code.type)), b.and_(code, one)
    low = b.icmp_unsigned("==", e, splat(0, e.type))
    shift = b.select(low, splat(0, e.type), b.sub(e, one))
    whole = b.shl(b.select(low, m, b.or_(m, splat(2, m.type))), shift)
    value = b.fmul(b.uitofp(whole, vector_of(F32)), splat(0.5, vector_of(F32)))
    sign = b.shl(b.and_(code, splat(8, code.type)), splat(28, code.type))
    return b.bitcast(b.or_(b.bitcast(value, sign.type), sign), value.type)


def int4(b: Builder, kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    return symmetric(b, kind, interleaved(b, row, at, half), ready_at(b, row, at, 5, half))


def mxfp4(b: Builder, kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    scale = ready_at(b, row, at, 5, half)
    return microscaled(b, kind, interleaved(b, row, at, half), scale, 1.0)


def block_codes(b: Builder, row: Row, at: Value, half: int, width: int) -> list[Value]:
    """The codes that end a block of 32 inputs and `width` bytes."""
    number = b.lshr(at, I64(5))
    return halved(
        b, at_byte(b, row.codes, b.mul(number, I64(width)), width * (half + 1) - 16), half
    )


def q4_0(b: Builder, kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    scale = ready_at(b, row, at, 5, half)
    return symmetric(b, kind, block_codes(b, row, at, half, 18), scale)


def gguf_mxfp4(b: Builder, kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    scale = ready_at(b, row, at, 5, half)
    return microscaled(b, kind, block_codes(b, row, at, half, 17), scale, 2.0)


def nibbles_of(b: Builder, base: Value, half: int) -> list[Value]:
    """32 bytes whose low halves are 32 codes, and high halves the next 32; higher bits remain."""
    read = [bytes_at(b, at_byte(b, base, LANES * i)) for i in range(VECTORS)]
    return [b.lshr(code, splat(4, code.type)) for code in read] if half else read


def in_super_block(b: Builder, row: Row, at: Value, width: int) -> tuple[Value, Value]:
    """(address of the block of 256 inputs, which 64 of them begin at `at`)."""
    number = b.lshr(at, I64(8))
    part = b.and_(b.lshr(at, I64(6)), I64(3))
    return at_byte(b, row.codes, b.mul(number, I64(width))), part


def q4_k(b: Builder, kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    block, part = in_super_block(b, row, at, 144)
    codes = nibbles_of(b, at_byte(b, block, 16, b.shl(part, I64(5))), half)
    scale, low = ready_at(b, row, at, 5, half), ready_at(b, row, at, 5, half, True)
    return affine(b, kind, codes, scale, low)


def q5_k(b: Builder, kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    block, part = in_super_block(b, row, at, 176)
    four = bits_at(b, at_byte(b, block, 48, b.shl(part, I64(5))), I64(4 * half), 15)
    fifth = bits_at(b, at_byte(b, block, 16), b.add(b.shl(part, I64(1)), I64(half)), 1)
    codes = sliced(b, b.or_(four, shifted(b, fifth, 4)))
    scale, low = ready_at(b, row, at, 5, half), ready_at(b, row, at, 5, half, True)
    wide = (b.uitofp(b.zext(code, vector_of(I32)), scale.type) for code in codes)
    return [to_model(b, kind, fma(b, scale, code, low)) for code in wide]


def q6_k(b: Builder, kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    block, part = in_super_block(b, row, at, 210)
    side, turn = b.lshr(part, I64(1)), b.shl(b.and_(part, I64(1)), I64(2))
    four = bits_at(b, at_byte(b, block, b.shl(side, I64(6)), 32 * half), turn, 15)
    two = at_byte(b, block, 128, b.shl(side, I64(5)))
    two = bits_at(b, two, b.add(turn, I64(2 * half)), 3)
    whole = b.or_(four, shifted(b, two, 4))
    codes = sliced(b, b.sub(whole, splat(32, whole.type)))
    first = at_byte(b, row.ready, b.shl(b.lshr(at, I64(4)), I64(2)), 8 * half)
    values = []
    for i, code in enumerate(codes):
        scale = float_at(b, at_byte(b, first, 4 * (LANES * i // 16)))
        value = b.fmul(b.sitofp(b.sext(code, vector_of(I32)), scale.type), scale)
        values.append(to_model(b, kind, value))
    return values


def bits_at(b: Builder, address: Value, shift: Value, mask: int) -> Value:
    """(byte >> shift) & mask of 32 bytes; vectors shift words of 16 bits, so bits come across."""
    kind = vector_of(I16, GROUP // 2)
    words = b.load(b.inttoptr(address, kind.as_pointer()), align=1)
    words = b.lshr(words, broadcast(b, b.trunc(shift, I16), GROUP // 2))
    return b.and_(b.bitcast(words, vector_of(I8, GROUP)), splat(mask, vector_of(I8, GROUP)))


def shifted(b: Builder, small: Value, left: int) -> Value:
    """Bytes shifted to the left, that are small enough to stay bytes."""
    words = b.bitcast(small, vector_of(I16, GROUP // 2))
    return b.bitcast(b.shl(words, splat(left, words.type)), small.type)


def sliced(b: Builder, codes: Value) -> list[Value]:
    """32 elements -> `VECTORS` vectors of LANES."""
    picks = (range(LANES * i, LANES * (i + 1)) for i in range(VECTORS))
    return [b.shuffle_vector(codes, codes, constant(list(pick), I32)) for pick in picks]


def fp8(b: Builder, kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """e4m3: moved to where float16 has exponent and fraction it is the value over 2^8.

    One more in the place of the last bit carries into the exponent's highest bit for the code that
    is no number, and only for that: set there, that bit makes it float16's NaN.
    """
    scale = ready_at(b, row, at, 5, half)
    address = at_byte(b, row.codes, at, 32 * half)
    raw = b.load(b.inttoptr(address, vector_of(I8, GROUP).as_pointer()), align=1)
    wide = b.sext(raw, vector_of(I16, GROUP))
    moved = b.and_(b.shl(wide, splat(7, wide.type)), splat(-0x4001, wide.type))
    carried = b.and_(b.add(moved, splat(0x80, wide.type)), splat(0x4000, wide.type))
    values = []
    for number in sliced(b, b.or_(moved, carried)):
        value = b.fpext(b.bitcast(number, vector_of(F16)), vector_of(F32))
        values.append(to_model(b, kind, b.fmul(value, scale)))
    return values


def ct_int4(rounding: Any, b: Builder, kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """As int4, but rounded to the scale's type first."""
    scale = ready_at(b, row, at, 5, half)
    offset = b.fmul(scale, splat(-8.0, scale.type))
    codes = interleaved(b, row, at, half)
    if TABLE:
        steps = constant([float(i) for i in range(16)])
        table = to_model(b, rounding, fma(b, scale, steps, offset))
        return [look_up(b, to_model(b, kind, table), code) for code in codes]
    return [to_model(b, kind, v) for v in affine(b, rounding, codes, scale, offset)]


def _of_scales(kind: Any) -> Expander:
    return Expander(shared(kind), partial(ct_int4, kind), PAIRED)


EXPANDERS: dict[str, Expander] = {
    "plain": Expander(nothing, plain),
    "int8": Expander(contiguous(6, halves), int8),
    "int4": Expander(contiguous(5, halves), int4, PAIRED),
    "mxfp4": Expander(contiguous(5, powers), mxfp4, PAIRED),
    "fp8": Expander(shared(F32_KIND, 256.0), fp8),
    "q8_0": Expander(inside(34, I16, half_floats), q8_0),
    "q4_0": Expander(inside(18, I16, half_floats), q4_0),
    "gguf_mxfp4": Expander(inside(17, I8, half_power), gguf_mxfp4),
    "q4_k": Expander(scales_and_minima(144), q4_k),
    "q5_k": Expander(scales_and_minima(176), q5_k),
    "q6_k": Expander(q6_scales, q6_k),
    "ct_int4.float32": _of_scales(F32_KIND),
    "ct_int4.bfloat16": _of_scales(BF16_KIND),
    "ct_int4.float16": _of_scales(F16_KIND),
    "int4.wide": Expander(shared(F16_KIND), int4, PAIRED),  # groups of more than 32
}
NAMES = tuple(EXPANDERS)  # kernels know an expander by its number here
