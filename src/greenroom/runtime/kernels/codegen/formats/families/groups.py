"""Encodings whose scales are a tensor of their own, and unencoded weights.

plain    bfloat16, float16 or float32
int8     signed bytes, a float16 scale for 64 inputs
int4     4-bit codes, neighbours in a byte, a float16 scale for 32 inputs or more (int4.wide)
mxfp4    4-bit floats (e2m1), neighbours in a byte, an e8m0 scale for 32 inputs
fp8      8-bit floats (e4m3), a float32 scale for a block of rows and columns
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from greenroom.runtime.kernels.codegen.formats.codes import (
    ALL,
    NEIGHBOURS,
    IntegerProduct,
    Left,
    Term,
    dot_int16,
    floats,
    group_scales,
    joint_product,
    signed_codes,
    split_bytes,
    zero,
)
from greenroom.runtime.kernels.codegen.formats.expand import (
    E2M1,
    GROUP,
    PAIRED,
    STARTS,
    TWICE_E2M1,
    Expander,
    all_to_model,
    from_table,
    scaled_bytes,
    sliced,
    symmetric,
)
from greenroom.runtime.kernels.codegen.formats.format import Format
from greenroom.runtime.kernels.codegen.formats.scales import Row, half_floats, prepare_in_vectors
from greenroom.runtime.kernels.codegen.llvm.target import LANES
from greenroom.runtime.kernels.codegen.llvm.values import (
    BF16_KIND,
    ELEMENT,
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
    Variable,
    below_or_all,
    counted_loop,
)

# Scales.


def contiguous(shift: int, element: Any, read: Callable[[Value], Value]) -> Any:
    """Make the `prepare` function for encodings whose scales are contiguous in memory.

    The row has one scale for 2^shift inputs. read(vector of LANES elements) converts scales to
    float32.
    """

    def prepare(row: Row) -> None:
        def value(at: Value, left: Value | None) -> list[Value]:
            place = row.scale + at * (element.width // 8)
            return [read(place.load(element, LANES, below_or_all(left)))]

        prepare_in_vectors(row, (row.inputs + ((1 << shift) - 1)) >> shift, value)

    return prepare


def repeated(kind: Any, factor: float = 1.0) -> Any:
    """Make the `prepare` function for scales that several groups of 32 inputs share.

    Its code writes each scale of type `kind` once for each of the `row.share` groups that share the
    scale. Scales are multiplied by `factor`, a power of two.
    """

    def prepare(row: Row) -> None:
        groups, column = row.inputs >> 5, Variable(row.scale)
        with counted_loop(0, groups, row.share) as start:
            address = column.value
            column.value = address + SIZE[kind]
            value = address.load(ELEMENT[kind]).widened(kind) * factor
            with counted_loop(start, (start + row.share).at_most(groups)) as at:
                (row.ready + (at << 2)).store(value)

    return prepare


# Unencoded weights.


def no_scales(row: Row) -> None:
    """Emit nothing: the `prepare` function of encodings without scales."""


def plain(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """Load 32 unencoded weights of a row as float32."""
    size = SIZE[kind]
    codes = row.codes + at * size + 32 * size * half
    return [(codes + size * start).weights(kind) for start in STARTS]


# int8.


def int8(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """Decode int8 weights: code times scale, one scale for 64 inputs."""
    return scaled_bytes(kind, row.codes + at + 32 * half, row.scale_at(at, 6, half))


def int8_terms(row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    first, total = row.codes + at, zero(at)
    for i in range(2):
        total = dot_int16(total, signed_codes((first + 32 * i).load(I32, 8)), x[i])
    return [(0, floats(total), group_scales(row.ready, at, left, ALL, 6))]


# Four bits.


def interleaved(row: Row, at: Value, half: int) -> list[Value]:
    """Load 4-bit codes of which each byte holds two neighbours.

    The codes are the low bits of int32, in the order of lanes PAIRED.
    """
    pairs = LANES == 16
    word, shifts = I64 if pairs else I32, [4 * (i // 2 if pairs else i) for i in NATURAL]
    places = (row.codes + (at >> 1) + (16 * half + start // 2) for start in STARTS)
    return [place.load(word).broadcast(8).bitcast(I32) >> shifts for place in places]


def neighbours(row: Row, at: Value, left: Left) -> tuple[Value, Value]:
    """Load 64 bytes, each with the codes of two neighbours."""
    mask = None if left is None else (left >> 3).below(16)
    return split_bytes((row.codes + (at >> 1)).load(I32, 16, mask))


def e8m0(raw: Value) -> Value:
    """Convert e8m0 scales to float32: 2^(e - 127); 255 is NaN."""
    e = raw.convert(I32)
    bits = e.constant(1 << 22).where(e.equals(0), e << 23)
    return e.constant(0x7FC00000).where(e.equals(255), bits).bitcast(F32)


# fp8.


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


_INT4 = partial(symmetric, interleaved)
FORMATS: dict[str, Format] = {
    "plain": Format(Expander(no_scales, plain)),
    "int8": Format(
        Expander(contiguous(6, I16, half_floats), int8),
        IntegerProduct(int8_terms, shift=6, paired=False, row_by_row=True),
    ),
    "int4": Format(
        Expander(contiguous(5, I16, half_floats), _INT4, PAIRED),
        joint_product(neighbours, NEIGHBOURS, offset=8),
    ),
    "int4.wide": Format(Expander(repeated(F16_KIND), _INT4, PAIRED)),  # groups of more than 32
    "mxfp4": Format(
        Expander(
            contiguous(5, I8, e8m0),
            partial(from_table, interleaved, E2M1, exact=(BF16_KIND,)),
            PAIRED,
        ),
        joint_product(neighbours, NEIGHBOURS, table=TWICE_E2M1, factor=0.5),
    ),
    "fp8": Format(Expander(repeated(F32_KIND, 256.0), fp8)),
}
