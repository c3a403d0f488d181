"""A row of stored weights, and the code that writes its scales as float32, side by side.

A `prepare(row)` writes scales to `row.ready` and minima to `row.minima`. It costs little there and
much beside the weights.
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
    counted,
)


@dataclass(frozen=True, slots=True)
class Row:
    """Addresses that an expander finds a row's weights by.

    codes:  the row's codes
    ready:  float32 scales, as `prepare` has written them; where there are minima, they follow, one
            for each scale, behind room for one scale for 8 inputs
    inputs: elements of the row
    scale:  its first scale, where scales are a tensor of their own
    share:  groups of 32 inputs that have one scale, where that differs between models
    powers: float32 numbers that the prepared scales are multiplied with, or None
    """

    codes: Value
    ready: Value
    inputs: Value
    scale: Value | None = None
    share: Value | None = None
    powers: Value | None = None

    @property
    def minima(self) -> Value:
        return self.ready + (self.inputs >> 3)

    def put(self, at: Value, scales: Value, left: Value | None = None) -> None:
        """Prepare a vector of scales from number `at` on, times their powers; 0 beyond those that
        are left."""
        if self.powers is not None:
            mask = below_or_all(left, scales.lanes)
            scales *= (self.powers + (at << 2)).load(F32, scales.lanes, mask)
        (self.ready + (at << 2)).store(scales)

    def scale_at(self, at: Value, shift: int, half: int, minimum: bool = False) -> Value:
        """The prepared scale (or minimum) of the group at + 32 half, one for 2^shift inputs."""
        base = self.minima if minimum else self.ready
        return (base + ((at >> shift) << 2) + 4 * (32 * half >> shift)).load(F32).wide()


def nothing(row: Row) -> None:
    """There are no scales."""


def in_vectors(row: Row, count: Value, value: Callable[[Value, Value | None], Value]) -> None:
    """Prepare scales value(at, left), at .. at + LANES of `count`, of which `left` exist or all.

    The last LANES overlap with those before; only where there are fewer do some not exist. Stores
    are whole there too, since a load soon after a masked one waits for it.
    """

    def put(at: Value, left: Value | None) -> None:
        row.put(at, value(at, left), left)

    left = count & (LANES - 1)
    with count.b.if_else((count >= LANES).ir) as (many, few):
        with many:
            with counted(0, count - left, LANES) as at:
                put(at, None)
            with count.b.if_then((left > 0).ir):
                put(count - LANES, None)
        with few:
            put(count.constant(0), count)


def contiguous(shift: int, element: Any, read: Callable[[Value], Value]) -> Any:
    """Scales that lie side by side, one for 2^shift inputs: LANES elements -> float32."""

    def prepare(row: Row) -> None:
        def value(at: Value, left: Value | None) -> Value:
            place = row.scale + at * (element.width // 8)
            return read(place.load(element, LANES, below_or_all(left)))

        in_vectors(row, (row.inputs + ((1 << shift) - 1)) >> shift, value)

    return prepare


def half_floats(raw: Value) -> Value:
    """float16 numbers."""
    return raw.widened(F16_KIND)


def powers(raw: Value) -> Value:
    """e8m0: 2^(e - 127), and 255 for NaN."""
    e = raw.to(I32)
    bits = e.constant(1 << 22).where(e.equals(0), e << 23)
    return e.constant(0x7FC00000).where(e.equals(255), bits).bits(F32)


def half_powers(raw: Value) -> Value:
    """e8m0 numbers of GGUF: 2^(e - 128)."""
    e = raw.to(I32)
    small = e.constant(0x200000) << (e & 1)
    return small.where(e < 2, (e - 1) << 23).bits(F32)


def shared(kind: Any, factor: float = 1.0) -> Any:
    """Scales of a kind, each for `row.share` groups: repeated, so that every group has its own.

    They are multiplied by `factor`, a power of two.
    """

    def prepare(row: Row) -> None:
        groups, column = row.inputs >> 5, Variable(row.scale)
        with counted(0, groups, row.share) as start:
            address = column.now
            column.now = address + SIZE[kind]
            value = address.load(ELEMENT[kind]).widened(kind) * factor
            with counted(start, (start + row.share).at_most(groups)) as at:
                (row.ready + (at << 2)).store(value)

    return prepare


def inside(width: int, element: Any, read: Callable[[Value], Value]) -> Any:
    """Scales that begin blocks of 32 inputs and `width` bytes: LANES elements -> float32."""
    picked = _picked if LANES == 16 and element == I16 else _apart

    def prepare(row: Row) -> None:
        def value(at: Value, left: Value | None) -> Value:
            fetch = picked if left is None else _apart
            return read(fetch(row.codes + at * width, width, element, left))

        in_vectors(row, row.inputs >> 5, value)

    return prepare


def _picked(address: Value, width: int, element: Any, left: None) -> Value:
    """As `_apart`, of words that all exist: picked out of pairs of whole vectors."""
    words = width // 2
    count = 63 // words + 1  # of a pair of vectors
    count = 1 << (count.bit_length() - 1)
    found = None
    for start in range(0, LANES, count):
        mine = range(start, start + count)
        first = min(start * width, LANES * width - 128)  # nothing beyond the last block is read
        skipped = start * words - first // 2
        one, two = ((address + first + 64 * i).load(element, 32) for i in range(2))
        some = one.pick([words * (i - start) + skipped if i in mine else i for i in range(32)], two)
        kept = [32 + i if i in mine else i for i in range(32)]
        found = some if found is None else found.pick(kept, some)
    return found.pick(NATURAL)


def _apart(address: Value, width: int, element: Any, left: Value | None) -> Value:
    """LANES elements that begin `width` bytes apart; the last that exists stands for those beyond.

    One by one: gathering them takes several times as long on processors that guard gathers.
    """
    found = Value(address.b, ir.Constant(ir.VectorType(element, LANES), ir.Undefined))
    for i in NATURAL:
        number = address.constant(i)
        if left is not None:
            number = number.at_most(left - 1)
        found = found.with_lane(i, (address + number * width).load(element))
    return found


def scales_and_minima(width: int) -> Any:
    """q4_k and q5_k: d, dmin and eight scales and minima of six bits; the minima are negated."""

    def prepare(row: Row) -> None:
        with counted(0, row.inputs >> 8) as number:
            block, at = row.codes + number * width, number << 3
            head = block.load(I32, 4)
            first = (head.pick((1, 3, 2, 3)) >> (0, 0, 0, 4)) & ((0x3F3F3F3F, 0x0F0F0F0F) * 2)
            second = (head.pick((1, 1, 2, 2)) >> 2) & ((0, 0x30303030) * 2)
            six = (first | second).bits(I8).to(I32)
            pair = block.load(F16, 2).to(F32) * (1.0, -1.0)
            value = six.to(F32) * pair.pick([0] * 8 + [1] * 8)
            row.put(at, value.pick(range(8)))
            (row.minima + (at << 2)).store(value.pick(range(8, 16)))

    return prepare


def q6_scales(row: Row) -> None:
    """16 scales of eight bits times d."""
    with counted(0, row.inputs >> 8) as number:
        block = row.codes + number * 210
        scales = (block + 192).load(I8, 16).to(I32, signed=True).to(F32, signed=True)
        row.put(number << 4, scales * (block + 208).load(I16).widened(F16_KIND))
