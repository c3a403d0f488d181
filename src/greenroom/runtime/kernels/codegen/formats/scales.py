"""Rows of quantised weights, and LLVM code that writes a row's scales as float32.

Each encoding has a function `prepare(row)`, which emits code that writes scales to `row.ready` and
minima to `row.minima`. Converting a whole row of scales at a time costs less than converting each
scale when its weights are decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from greenroom.runtime.kernels.codegen.llvm.target import LANES
from greenroom.runtime.kernels.codegen.llvm.values import (
    ELEMENT,
    F16,
    F16_KIND,
    F32,
    I8,
    I16,
    I32,
    NATURAL,
    SIZE,
    Value,
    Variable,
    below_or_all,
    counted_loop,
)


@dataclass(frozen=True, slots=True)
class Row:
    """The addresses of a row of quantised weights and its scales, in LLVM code.

    codes:  the row's codes
    ready:  memory for the scales in float32; the minima, if the encoding has them, begin
            inputs / 8 bytes later
    inputs: number of the row's elements
    scale:  the row's first scale, if scales are a separate tensor
    share:  number of groups of 32 inputs with one scale, if that differs between models
    powers: float32 factors that the scales are multiplied by, or None
    """

    codes: Value
    ready: Value
    inputs: Value
    scale: Value | None = None
    share: Value | None = None
    powers: Value | None = None

    @property
    def minima(self) -> Value:
        """Return the address of a row's minima in float32."""
        return self.ready + (self.inputs >> 3)

    def put(self, at: Value, scales: Value, left: Value | None = None) -> None:
        """Write a vector of scales from index `at` of a row on.

        Scales are multiplied by the row's `powers` if there are any. Only the powers of the first
        `left` scales are read; the products of all others are 0.
        """
        if self.powers is not None:
            mask = below_or_all(left, scales.lanes)
            scales *= (self.powers + (at << 2)).load(F32, scales.lanes, mask)
        (self.ready + (at << 2)).store(scales)

    def scale_at(self, at: Value, shift: int, half: int, minimum: bool = False) -> Value:
        """Load the float32 scale (or minimum) of one input of a row.

        The input has the index at + 32 * half. `shift`: a row has one scale for 2^shift inputs.
        """
        base = self.minima if minimum else self.ready
        return (base + ((at >> shift) << 2) + 4 * (32 * half >> shift)).load(F32).broadcast()


def no_scales(row: Row) -> None:
    """Emit nothing: the `prepare` function of encodings without scales."""


def prepare_in_vectors(
    row: Row, count: Value, value: Callable[[Value, Value | None], Value]
) -> None:
    """Write a row's scales as float32, one vector of LANES scales at a time.

    value(at, left) returns a vector of scales from index `at` on. `left` is None, but if the row
    has fewer scales than LANES, it is their number. The last vector overlaps with the one before.
    """
    # No store is masked: a load soon after a masked store waits for the store.

    def put(at: Value, left: Value | None) -> None:
        row.put(at, value(at, left), left)

    left = count & (LANES - 1)
    with count.b.if_else((count >= LANES).ir) as (many, few):
        with many:
            with counted_loop(0, count - left, LANES) as at:
                put(at, None)
            with count.b.if_then((left > 0).ir):
                put(count - LANES, None)
        with few:
            put(count.constant(0), count)


def contiguous(shift: int, element: Any, read: Callable[[Value], Value]) -> Any:
    """Make the `prepare` function for encodings whose scales are contiguous in memory.

    The row has one scale for 2^shift inputs. read(vector of LANES elements) converts scales to
    float32.
    """

    def prepare(row: Row) -> None:
        def value(at: Value, left: Value | None) -> Value:
            place = row.scale + at * (element.width // 8)
            return read(place.load(element, LANES, below_or_all(left)))

        prepare_in_vectors(row, (row.inputs + ((1 << shift) - 1)) >> shift, value)

    return prepare


def half_floats(raw: Value) -> Value:
    """Convert float16 bits to float32."""
    return raw.widened(F16_KIND)


def e8m0(raw: Value) -> Value:
    """Convert e8m0 scales to float32: 2^(e - 127); 255 is NaN."""
    e = raw.convert(I32)
    bits = e.constant(1 << 22).where(e.equals(0), e << 23)
    return e.constant(0x7FC00000).where(e.equals(255), bits).bitcast(F32)


def e8m0_halves(raw: Value) -> Value:
    """Convert GGUF's e8m0 scales, which are halved, to float32: 2^(e - 128)."""
    e = raw.convert(I32)
    small = e.constant(0x200000) << (e & 1)
    return small.where(e < 2, (e - 1) << 23).bitcast(F32)


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


def in_blocks(width: int, element: Any, read: Callable[[Value], Value]) -> Any:
    """Make the `prepare` function for scales at the start of blocks of 32 inputs.

    Blocks have `width` bytes. read(vector of LANES elements) converts scales to float32.
    """
    picked = _gather_from_vector_pairs if LANES == 16 and element == I16 else _gather_each

    def prepare(row: Row) -> None:
        def value(at: Value, left: Value | None) -> Value:
            fetch = picked if left is None else _gather_each
            return read(fetch(row.codes + at * width, width, element, left))

        prepare_in_vectors(row, row.inputs >> 5, value)

    return prepare


def _gather_from_vector_pairs(address: Value, width: int, element: Any, left: None) -> Value:
    """Load as `_gather_each` if all elements exist, by shuffles of pairs of vectors."""
    spacing = width // 2
    count = 63 // spacing + 1  # of a pair of vectors
    count = 1 << (count.bit_length() - 1)
    scales = None
    for start in range(0, LANES, count):
        mine = range(start, start + count)
        first = min(start * width, LANES * width - 128)  # never beyond the last block
        skipped = start * spacing - first // 2
        one, two = ((address + first + 64 * i).load(element, 32) for i in range(2))
        some = one.shuffle(
            [spacing * (i - start) + skipped if i in mine else i for i in range(32)], two
        )
        places = [32 + i if i in mine else i for i in range(32)]
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


def q6_scales(row: Row) -> None:
    """Emit code that writes the scales of GGUF q6_k as float32.

    A block has 16 scales of eight bits, and a float16 factor that they are multiplied by.
    """
    with counted_loop(0, row.inputs >> 8) as number:
        block = row.codes + number * 210
        scales = (block + 192).load(I8, 16).convert(I32, signed=True).convert(F32, signed=True)
        row.put(number << 4, scales * (block + 208).load(I16).widened(F16_KIND))
