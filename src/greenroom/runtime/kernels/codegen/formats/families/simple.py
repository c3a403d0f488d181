"""GGUF encodings in blocks of 32 weights.

A block is a float16 scale d (an e8m0 scale in gguf_mxfp4) and the codes. Codes of four bits are the
last 16 bytes of a block: byte i has code i in its low and code i + 16 in its high half.
runtime/encodings/ggml/ has the layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir

from greenroom.runtime.kernels.codegen.formats.codes import (
    MINIMA,
    IntegerProduct,
    Left,
    Term,
    dot_int16,
    floats,
    group_scales,
    joined,
    joint_product,
    runs,
    signed_codes,
    split_bytes,
    zero,
)
from greenroom.runtime.kernels.codegen.formats.expand import (
    STARTS,
    TABLE,
    TWICE_E2M1,
    Expander,
    affine,
    all_to_model,
    from_table,
    scaled_bytes,
    symmetric,
)
from greenroom.runtime.kernels.codegen.formats.format import Format
from greenroom.runtime.kernels.codegen.formats.scales import Row, half_floats, prepare_in_vectors
from greenroom.runtime.kernels.codegen.llvm.target import FEATURES, LANES
from greenroom.runtime.kernels.codegen.llvm.values import (
    BF16_KIND,
    F32,
    F32_KIND,
    I1,
    I8,
    I16,
    I32,
    NATURAL,
    Value,
)

# Scales.


def in_blocks(width: int, element: Any, read: Callable[[Value], Value]) -> Any:
    """Make the `prepare` function for scales at the start of blocks of 32 inputs.

    Blocks have `width` bytes. read(vector of LANES elements) converts scales to float32.
    """

    def prepare(row: Row) -> None:
        def value(at: Value, left: Value | None) -> list[Value]:
            return [read(_gather(row.codes + at * width, width, element, left))]

        prepare_in_vectors(row, row.inputs >> 5, value)

    return prepare


def pairs_in_blocks(width: int) -> Any:
    """Make the `prepare` function for scales and minima at the start of blocks.

    A block has 32 inputs, in `width` bytes, and begins with two float16 numbers.
    """

    def prepare(row: Row) -> None:
        def value(at: Value, left: Value | None) -> list[Value]:
            pair = _gather(row.codes + at * width, width, I32, left)
            return [half_floats(half.convert(I16)) for half in (pair, pair >> 16)]

        prepare_in_vectors(row, row.inputs >> 5, value)

    return prepare


def _gather(address: Value, width: int, element: Any, left: Value | None) -> Value:
    """Load LANES elements, `width` bytes apart; `left` of them exist (None: all)."""
    if left is None and LANES == 16 and element != I8:
        return _gather_from_vector_pairs(address, width, element)
    return _gather_each(address, width, element, left)


def _gather_from_vector_pairs(address: Value, width: int, element: Any) -> Value:
    """Load as `_gather_each` if all elements exist, by shuffles of pairs of vectors."""
    size = element.width // 8
    spacing, lanes = width // size, 64 // size
    count = (2 * lanes - 1) // spacing + 1  # of a pair of vectors
    count = 1 << (count.bit_length() - 1)
    scales = None
    for start in range(0, LANES, count):
        mine = range(start, start + count)
        first = min(start * width, LANES * width - 128)  # never beyond the last block
        skipped = start * spacing - first // size
        one, two = ((address + first + 64 * i).load(element, lanes) for i in range(2))
        some = one.shuffle(
            [spacing * (i - start) + skipped if i in mine else i for i in range(lanes)], two
        )
        places = [lanes + i if i in mine else i for i in range(lanes)]
        scales = some if scales is None else scales.shuffle(places, some)
    return scales.shuffle(NATURAL)


def _gather_each(address: Value, width: int, element: Any, left: Value | None) -> Value:
    """Load LANES elements, `width` bytes apart; lanes beyond `left` repeat the last element.

    One by one: a gather takes several times as long on processors that mitigate its side channels.
    """
    elements = Value(address.b, ir.Constant(ir.VectorType(element, LANES), ir.Undefined))
    for i in NATURAL:
        number = address.constant(i)
        if left is not None:
            number = number.at_most(left - 1)
        elements = elements.with_lane(i, (address + number * width).load(element))
    return elements


# Codes of four bits.


def block_codes(width: int, row: Row, at: Value, half: int) -> list[Value]:
    """Load the 4-bit codes of a block of 32 inputs.

    The block has `width` bytes; its last 16 bytes hold codes i and i + 16 each. The codes are the
    low bits of int32.
    """
    return low_and_high(block_at(width, row, at, half))


def block_at(width: int, row: Row, at: Value, half: int) -> Value:
    """Find the last 16 bytes of a block of 32 inputs, which has `width` bytes."""
    return row.codes + (at >> 5) * width + (width * (half + 1) - 16)


def low_and_high(address: Value) -> list[Value]:
    """Load codes of four bits as int32: byte i has codes i and i + 16."""
    read = [(address + start).load(I8, LANES).convert(I32) for start in range(0, 16, LANES)]
    return read + [code >> 4 for code in read]


def from_bytes(
    address_at: Callable[[Row, Value, int], Value],
    table: Sequence[int],
    kind: Any,
    row: Row,
    at: Value,
    half: int,
    *,
    exact: tuple[Any, ...] = (),
) -> list[Value]:
    """Decode weights as `from_table`: byte i at an address has codes i and i + 16.

    The table has integers of one byte. A shuffle of bytes looks up 16 of them at once, which is
    shorter than two look-ups of eight float32.
    """
    if TABLE or "ssse3" not in FEATURES:

        def codes_at(row: Row, at: Value, half: int) -> list[Value]:
            return low_and_high(address_at(row, at, half))

        return from_table(codes_at, table, kind, row, at, half, exact=exact)
    raw, scale = address_at(row, at, half).load(I8, 16), row.scale_at(at, 5, half)
    values = raw.constant(table)
    both = (
        values.call("llvm.x86.ssse3.pshuf.b.128", raw.ir.type, code)
        for code in (raw & 15, raw >> 4)
    )
    parts = [v.shuffle(range(i, i + LANES)) for v in both for i in range(0, 16, LANES)]
    return all_to_model(
        F32_KIND if kind in exact else kind,
        [v.convert(I32, signed=True).convert(F32, signed=True) * scale for v in parts],
    )


def _codes_of(address: Value, lanes: int, number: int, left: Left) -> Value:
    """Load the codes of block `number` of 32 inputs of an iteration; 0 if the row lacks it."""
    mask = None if left is None or number == 0 else (left > 32 * number).broadcast(lanes)
    return address.load(I32, lanes, mask)


def four_blocks(width: int, row: Row, at: Value, left: Left) -> tuple[Value, Value]:
    """Load the last 16 bytes of each of four blocks of `width` bytes."""
    first = row.codes + (at >> 5) * width + (width - 16)
    return split_bytes(joined([_codes_of(first + width * i, 4, i, left) for i in range(4)]))


# q8_0.


def q8_0(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """Decode GGUF q8_0 weights: code times scale, one scale for a block of 32 inputs."""
    codes = row.codes + at + (at >> 4) + (34 * half + 2)
    return scaled_bytes(kind, codes, row.scale_at(at, 5, half))


def q8_0_terms(row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    first, terms = row.codes + at + (at >> 4) + 2, []
    for i in range(2):
        codes = signed_codes(_codes_of(first + 34 * i, 8, i, left))
        scale = group_scales(row.ready, at, left, [i] * 16)
        terms.append((0, floats(dot_int16(zero(at), codes, x[i])), scale))
    return terms


# Codes of five bits.


def five_bits(width: int, row: Row, at: Value, half: int) -> list[Value]:
    """Load the 5-bit codes of a block of 32 inputs, as int32.

    The last 16 of its `width` bytes have the codes' low four bits; an int32 before them has the
    fifth bits.
    """
    fifth = (row.codes + (at >> 5) * width + (width * (half + 1) - 20)).load(I32).broadcast()
    return [
        (four & 15) | (((fifth >> [start + i for i in NATURAL]) & 1) << 4)
        for start, four in zip(STARTS, block_codes(width, row, at, half), strict=True)
    ]


def five_bit_blocks(width: int, row: Row, at: Value, left: Left) -> tuple[Value, Value]:
    """Load the 5-bit codes of four blocks: as `four_blocks`, and 32 bits before them."""
    first = row.codes + (at >> 5) * width + (width - 20)
    fifth_bits = joined([_codes_of(first + width * i, 1, i, left) for i in range(4)])
    low, high = (
        four | four.constant(16).where((fifth_bits >> shift).convert(I16).bitcast(I1), 0)
        for four, shift in zip(four_blocks(width, row, at, left), (0, 16), strict=True)
    )
    return low, high


def q5_0(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """Decode GGUF q5_0 weights: scale * (code - 16)."""
    codes, scale = five_bits(22, row, at, half), row.scale_at(at, 5, half)
    return all_to_model(kind, [(code - 16).convert(F32, signed=True) * scale for code in codes])


# q4_1 and q5_1.


def q4_1(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """Decode GGUF q4_1 weights: code times scale, plus minimum."""
    codes = block_codes(20, row, at, half)
    return affine(kind, codes, row.scale_at(at, 5, half), row.scale_at(at, 5, half, True))


def q5_1(kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """Decode GGUF q5_1 weights: codes of five bits as in q5_0, times scale, plus minimum."""
    codes = five_bits(24, row, at, half)
    scale, minimum = row.scale_at(at, 5, half), row.scale_at(at, 5, half, True)
    return all_to_model(kind, [scale.fma(code.convert(F32), minimum) for code in codes])


# gguf_mxfp4.


def e8m0_halves(raw: Value) -> Value:
    """Convert GGUF's e8m0 scales, which are halved, to float32: 2^(e - 128)."""
    e = raw.convert(I32)
    small = e.constant(0x200000) << (e & 1)
    return small.where(e < 2, (e - 1) << 23).bitcast(F32)


FORMATS: dict[str, Format] = {
    "q4_1": Format(
        Expander(pairs_in_blocks(20), q4_1),
        joint_product(partial(four_blocks, 20), runs(16), minima=MINIMA),
    ),
    "q5_1": Format(
        Expander(pairs_in_blocks(24), q5_1),
        joint_product(partial(five_bit_blocks, 24), runs(16), minima=MINIMA),
    ),
    "q8_0": Format(
        Expander(in_blocks(34, I16, half_floats), q8_0),
        IntegerProduct(q8_0_terms, paired=False),
    ),
    "q4_0": Format(
        Expander(in_blocks(18, I16, half_floats), partial(symmetric, partial(block_codes, 18))),
        joint_product(partial(four_blocks, 18), runs(16), offset=8),
    ),
    "q5_0": Format(
        Expander(in_blocks(22, I16, half_floats), q5_0),
        joint_product(partial(five_bit_blocks, 22), runs(16), offset=16),
    ),
    "gguf_mxfp4": Format(
        Expander(
            in_blocks(17, I8, e8m0_halves),
            partial(from_bytes, partial(block_at, 17), TWICE_E2M1, exact=(BF16_KIND,)),
        ),
        joint_product(partial(four_blocks, 17), runs(16), table=TWICE_E2M1),
    ),
}
