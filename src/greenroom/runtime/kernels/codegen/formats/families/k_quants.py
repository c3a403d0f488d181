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
    IntegerProduct,
    Left,
    Term,
    floats,
    group_scales,
    runs,
    split_bytes,
    times,
    zero,
)
from greenroom.runtime.kernels.codegen.formats.expand import (
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
            block, at = row.codes + number * width, number << 3
            head = block.load(I32, 4)
            first = (head.shuffle((1, 3, 2, 3)) >> (0, 0, 0, 4)) & ((0x3F3F3F3F, 0x0F0F0F0F) * 2)
            second = (head.shuffle((1, 1, 2, 2)) >> 2) & ((0, 0x30303030) * 2)
            six = (first | second).bitcast(I8).convert(I32)
            pair = block.load(F16, 2).convert(F32) * (1.0, -1.0)
            value = six.convert(F32) * pair.shuffle([0] * 8 + [1] * 8)
            row.put(at, value.shuffle(range(8)))
            (row.minima + (at << 2)).store(value.shuffle(range(8, 16)))

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
    return [*terms, (0, x[4].bitcast(F32), group_scales(row.minima, at, left, [0, 1, 2, 3] * 4))]


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
    first, values = row.ready + ((at >> 4) << 2) + 8 * half, []
    for start, code in zip(STARTS, sliced((four | shifted(two)) - 32), strict=True):
        scale = (first + 4 * (start // 16)).load(F32).broadcast()
        values.append(code.convert(I32, signed=True).convert(F32, signed=True) * scale)
    return all_to_model(kind, values)


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


MINIMA = (0, 1, 10, 11)  # lanes with the sums of four groups, two for each block of 64 inputs
FORMATS: dict[str, Format] = {
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
