"""GGUF encodings in super-blocks of 256 weights.

A super-block has 8 groups of 32 weights or 16 groups of 16, whose scales (and minima) are small
integers times one or two float16 factors. runtime/encodings/ggml/ has the layouts.

A row is a whole number of super-blocks, so iterations are always complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from greenroom.runtime.kernels.codegen.formats.codes import (
    FOURS,
    MINIMA,
    IntegerProduct,
    Left,
    Term,
    floats,
    group_scales,
    minimum_term,
    runs,
    split_bytes,
    times,
    zero,
)
from greenroom.runtime.kernels.codegen.formats.expand import (
    GROUP,
    STARTS,
    Expander,
    affine,
    all_to_model,
    bits_at,
    shifted,
    sliced,
)
from greenroom.runtime.kernels.codegen.formats.format import Format
from greenroom.runtime.kernels.codegen.formats.scales import Row
from greenroom.runtime.kernels.codegen.llvm.target import LANES
from greenroom.runtime.kernels.codegen.llvm.values import (
    F16,
    F16_KIND,
    F32,
    I8,
    I16,
    I32,
    Value,
    counted_loop,
)

# Addresses.


def in_super_block(row: Row, at: Value, width: int) -> tuple[Value, Value]:
    """Find the GGUF block of 256 inputs, and the block's quarter, with input `at`.

    Blocks have `width` bytes. Return (address of the block, number of the quarter: 0 to 3).
    """
    return row.codes + (at >> 8) * width, (at >> 6) & 3


def half_super_block(row: Row, at: Value, width: int) -> tuple[Value, Value]:
    """Return (address of the block of 256 inputs, which half of it)."""
    return row.codes + (at >> 8) * width, (at >> 7) & 1


def twice(half: Value) -> Value:
    """Repeat eight int32 in both halves of a vector of int16."""
    return half.shuffle([*range(8)] * 2).bitcast(I16)


# q4_k and q5_k.


def scales_and_minima(width: int) -> Any:
    """Make the `prepare` function for scales and minima of GGUF q4_k and q5_k.

    A block of `width` bytes has two float16 factors, d and dmin, and eight scales and minima of 6
    bits. The minima are negated.
    """

    def prepare(row: Row) -> None:
        with counted_loop(0, row.inputs >> 8) as number:
            block = row.codes + number * width
            head = block.load(I32, 4)
            first = (head.shuffle((1, 3, 2, 3)) >> (0, 0, 0, 4)) & ((0x3F3F3F3F, 0x0F0F0F0F) * 2)
            second = (head.shuffle((1, 1, 2, 2)) >> 2) & ((0, 0x30303030) * 2)
            six = (first | second).bitcast(I8).convert(I32)
            pair = block.load(F16, 2).convert(F32) * (1.0, -1.0)
            value = six.convert(F32) * pair.shuffle([0] * 8 + [1] * 8)
            row.put(number << 3, value.shuffle(range(8)), value.shuffle(range(8, 16)))

    return prepare


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


def q4_k_terms(row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    start, side = half_super_block(row, at, 144)
    return _with_minima(row, at, split_bytes((start + 16 + (side << 6)).load(I32, 16)), x, left)


def q5_k_terms(row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    start, side = half_super_block(row, at, 176)
    four = split_bytes((start + 48 + (side << 6)).load(I32, 16))
    # Bit 4 side + 2 (upper half of the vector) + which half of the codes goes to bit 4.
    fifth = twice((start + 16).load(I32, 8)) >> (side << 2).convert(I16)
    codes = [
        low | ((fifth << ([4 - i] * 16 + [2 - i] * 16)).bitcast(I8) & 16)
        for i, low in enumerate(four)
    ]
    return _with_minima(row, at, codes, x, left)


def _with_minima(
    row: Row, at: Value, codes: Sequence[Value], x: list[Value], left: Left
) -> list[Term]:
    """Terms of q4_k and q5_k: groups 0 and 2 in one half of an iteration, 1 and 3 in the other."""
    terms = []
    for i, code in enumerate(codes):
        scale = group_scales(row.ready, at, left, [i] * 8 + [2 + i] * 8)
        terms.append((0, floats(times(code, x, i, zero(at))), scale))
    return [*terms, minimum_term(row, at, x, left)]


# Groups of 16.


def scales_of_sixteen(base: Value, at: Value, half: int) -> list[Value]:
    """Load the scales, or minima, of the vectors of 32 weights in groups of 16."""
    first = base + ((at >> 4) << 2) + 8 * half
    return [(first + 4 * (start // 16)).load(F32).broadcast() for start in STARTS]


def scaled_by_sixteen(kind: Any, row: Row, at: Value, half: int, codes: Value) -> list[Value]:
    """Multiply 32 signed bytes by the scales of groups of 16, and round."""
    wide = (c.convert(I32, signed=True).convert(F32, signed=True) for c in sliced(codes))
    scales = scales_of_sixteen(row.ready, at, half)
    return all_to_model(kind, [code * scale for code, scale in zip(wide, scales, strict=True)])


# q6_k.


def q6_scales(row: Row) -> None:
    """Emit code that writes the scales of GGUF q6_k as float32.

    A block has 16 scales of eight bits, and a float16 factor that they are multiplied by.
    """
    with counted_loop(0, row.inputs >> 8) as number:
        block = row.codes + number * 210
        scales = (block + 192).load(I8, 16).convert(I32, signed=True).convert(F32, signed=True)
        row.put(number << 4, scales * (block + 208).load(I16).widened(F16_KIND))


def q6_k(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """Decode GGUF q6_k weights: codes of four bits and two bits, minus 32, times a scale."""
    block, part = in_super_block(row, at, 210)
    side, turn = part >> 1, (part & 1) << 2
    four = bits_at(block + (side << 6) + 32 * half, turn, 15)
    two = bits_at(block + 128 + (side << 5), turn + 2 * half, 3)
    return scaled_by_sixteen(kind, row, at, half, (four | shifted(two)) - 32)


def q6_k_terms(row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    start, side = half_super_block(row, at, 210)
    four = split_bytes((start + (side << 6)).load(I32, 16))
    two = twice((start + 128 + (side << 5)).load(I32, 8))
    moved = two << ([4] * 16 + [2] * 16), two >> ([0] * 16 + [2] * 16)
    terms = []
    for i, (low, high) in enumerate(zip(four, moved, strict=True)):
        code = low | (high.bitcast(I8) & 48)
        scale = group_scales(row.ready, at, left, FOURS, 4, 4 * i)
        terms.append((i, floats(times(code, x, i, x[4 + i])), scale))
    return terms


# q3_k.


def q3_scales(row: Row) -> None:
    """Emit code that writes the scales of GGUF q3_k as float32.

    A block has a float16 factor, and 16 scales of six bits plus 32: 8 bytes hold the low four bits
    of scales i and i + 8, the next 4 bytes the high two bits of scales i, i + 4, i + 8 and i + 12.
    """
    with counted_loop(0, row.inputs >> 8) as number:
        block = row.codes + number * 110
        low = (block + 96).load(I32, 2).shuffle((0, 1, 0, 1)) >> (0, 0, 4, 4)
        high = (block + 104).load(I32).broadcast(4) >> (0, 2, 4, 6)
        six = ((low & 0x0F0F0F0F) | ((high & 0x03030303) << 4)).bitcast(I8).convert(I32)
        scales = (six - 32).convert(F32, signed=True)
        row.put(number << 4, scales * (block + 108).load(I16).widened(F16_KIND))


def q3_k(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """Decode GGUF q3_k weights: codes of two bits and one bit, minus 4, times a scale."""
    block, part = in_super_block(row, at, 110)
    side, turn = part >> 1, (part & 1) << 2
    two = bits_at(block + 32 + (side << 5), turn + 2 * half, 3)
    third = bits_at(block, (part << 1) + half, 1)
    return scaled_by_sixteen(kind, row, at, half, (two | (third << 2)) - 4)


def q3_k_terms(row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    """Terms of q3_k: both halves of an iteration hold 64 weights, in four groups."""
    start, side = half_super_block(row, at, 110)
    two = twice((start + 32 + (side << 5)).load(I32, 8))
    third = twice(start.load(I32, 8)) >> (side << 2).convert(I16)
    # Bits 0 to 3 go to bit 2: one after the other, for the quarters of the iteration.
    moved = third << ([2] * 16 + [1] * 16), third >> ([0] * 16 + [1] * 16)
    terms = []
    for i, high in enumerate(moved):
        low = two >> ([4 * i] * 16 + [4 * i + 2] * 16)
        code = (low.bitcast(I8) & 3) | (high.bitcast(I8) & 4)
        scale = group_scales(row.ready, at, left, FOURS, 4, 4 * i)
        terms.append((i, floats(times(code, x, i, x[4 + i])), scale))
    return terms


# q2_k.

# A byte has the codes of four weights. They are masked, not moved: a code is then 1, 4, 16 or 64
# times too large, and the scales are smaller by that.
MINIMA_OF_SIXTEEN = (0, 1, 2, 3, 8, 9, 10, 11)  # lanes, as MINIMA
MASKS = (0x03030303, 0x0C0C0C0C, 0x30303030, 0xC0C0C0C0)


def q2_scales(row: Row) -> None:
    """Emit code that writes the scales and minima of GGUF q2_k as float32.

    A block has 16 bytes with a scale in the low four bits and a minimum in the high bits, and a
    float16 factor for each of the two. The minima are negated.
    """
    moves = [4.0 ** -(i // 2 % 4) for i in range(16)]
    with counted_loop(0, row.inputs >> 8) as number:
        block = row.codes + number * 84
        both, pair = block.load(I8, 16), (block + 80).load(F16, 2).convert(F32)
        scales, minima = ((b.convert(I32)).convert(F32) for b in (both & 15, both >> 4))
        d, dmin = (pair.shuffle([i] * 16) for i in range(2))
        row.put(number << 4, scales * (d * moves), minima * -dmin)


def q2_k(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """Decode GGUF q2_k weights: code times scale, minus minimum."""
    block, part = in_super_block(row, at, 84)
    side, turn = part >> 1, (part & 1) << 2
    mask = (part.constant(3) << (turn + 2 * half)).convert(I8)
    codes = sliced((block + 16 + (side << 5)).load(I8, GROUP) & mask)
    scales, minima = (scales_of_sixteen(base, at, half) for base in (row.ready, row.minima))
    return all_to_model(
        kind,
        [
            scale.fma(code.convert(I32).convert(F32), minimum)
            for code, scale, minimum in zip(codes, scales, minima, strict=True)
        ],
    )


def q2_k_terms(row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    """Terms of q2_k: weights 0 to 31 and 64 to 95 in one half of an iteration."""
    start, side = half_super_block(row, at, 84)
    bytes_of_four = twice((start + 16 + (side << 5)).load(I32, 8)).bitcast(I32)
    scales, minima = ((base + ((at >> 4) << 2)).load(F32, 8) for base in (row.ready, row.minima))
    terms = []
    for i in range(2):
        code = (bytes_of_four & ([MASKS[i]] * 8 + [MASKS[2 + i]] * 8)).bitcast(I8)
        scale = scales.shuffle([2 * i + lane // 4 + 2 * (lane // 8) for lane in range(16)])
        terms.append((0, floats(times(code, x, i, zero(at))), scale))
    lanes = [lane % 4 + 4 * (lane // 8) for lane in range(16)]
    return [*terms, (0, x[4].bitcast(F32), minima.shuffle(lanes))]


FORMATS: dict[str, Format] = {
    "q2_k": Format(
        Expander(q2_scales, q2_k),
        IntegerProduct(
            q2_k_terms, shift=4, order=runs(32), separate_halves=True, minima=MINIMA_OF_SIXTEEN
        ),
    ),
    "q3_k": Format(
        Expander(q3_scales, q3_k),
        IntegerProduct(
            q3_k_terms, shift=4, order=runs(64), offset=4, separate_halves=True, paired=False
        ),
    ),
    "q4_k": Format(
        Expander(scales_and_minima(144), q4_k),
        IntegerProduct(q4_k_terms, order=runs(32), separate_halves=True, minima=MINIMA),
    ),
    "q5_k": Format(
        Expander(scales_and_minima(176), q5_k),
        IntegerProduct(q5_k_terms, order=runs(32), separate_halves=True, minima=MINIMA),
    ),
    "q6_k": Format(
        Expander(q6_scales, q6_k),
        IntegerProduct(
            q6_k_terms, shift=4, order=runs(64), offset=32, separate_halves=True, paired=False
        ),
    ),
}
