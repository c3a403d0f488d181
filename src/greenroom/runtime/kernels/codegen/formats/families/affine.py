"""Affine encodings: integer codes in groups, a scale and a zero a group (encodings/affine.py).

Expanders depend on the dtypes of codes and scales too, which are parts of their names:
`affine4.float16`, `symmetric8.int8.bfloat16`. A group has 32 inputs or more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from greenroom.runtime.kernels.codegen.formats.expand import (
    GROUP,
    PAIRED,
    STARTS,
    Expander,
    all_to_model,
    around,
    sliced,
)
from greenroom.runtime.kernels.codegen.formats.families.groups import interleaved, repeated
from greenroom.runtime.kernels.codegen.formats.format import Format
from greenroom.runtime.kernels.codegen.formats.scales import Row
from greenroom.runtime.kernels.codegen.llvm.target import LANES
from greenroom.runtime.kernels.codegen.llvm.values import (
    BF16_KIND,
    ELEMENT,
    F16_KIND,
    F32,
    F32_KIND,
    I8,
    I32,
    I64,
    NATURAL,
    SIZE,
    Value,
    Variable,
    counted_loop,
)

SYMMETRIC, _, INDEXED = KINDS = "symmetric", "affine", "indexed"  # of encodings/affine.py


@dataclass(frozen=True, slots=True)
class Affine:
    """A variant of the affine encodings.

    kind:   symmetric, affine or indexed
    bits:   of a code, 4 or 8
    scales: type of the scales
    signed: are codes and zeros int8?
    """

    kind: str
    bits: int
    scales: Any
    signed: bool

    @property
    def format(self) -> Format:
        """Make the code for this variant."""
        if self.kind == INDEXED:
            return Format(Expander(partial(by_index, self), partial(indexed, self)))
        prepare = repeated(self.scales) if self.kind == SYMMETRIC else partial(with_zeros, self)
        order = PAIRED if self.bits == 4 else NATURAL
        return Format(Expander(prepare, partial(grouped, self), order))

    def byte(self, place: Value) -> Value:
        """Load a zero as float32."""
        return place.load(I8).convert(I32, signed=self.signed).convert(F32, signed=True)

    def bytes_at(self, row: Row, at: Value, half: int) -> list[Value]:
        """Load 32 codes of a byte each as int32."""
        first = row.codes + at + GROUP * half
        return [(first + i).load(I8, LANES).convert(I32, signed=self.signed) for i in STARTS]

    def rounded(self, kind: Any, values: list[Value]) -> list[Value]:
        """Round weights to the type of the scales, then to the model's type."""
        return all_to_model(kind, all_to_model(self.scales, values))


def with_zeros(variant: Affine, row: Row) -> None:
    """Write a row's scales and zeros as float32, once for each 32 inputs; zeros are minima."""
    repeated(variant.scales)(row)
    groups, column = row.inputs >> 5, Variable(row.other)
    with counted_loop(0, groups, row.share) as start:
        value = variant.byte(column.value)
        column.value += 1
        with counted_loop(start, (start + row.share).at_most(groups)) as at:
            (row.minima + (at << 2)).store(value)


def grouped(variant: Affine, kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """Decode weights whose groups are neighbours: scale * (code - zero)."""
    scale = row.scale_at(at, 5, half)
    if variant.kind != SYMMETRIC:
        zero = row.scale_at(at, 5, half, True)
    else:
        zero = scale.constant(0.0 if variant.signed else 2.0 ** (variant.bits - 1))
    if variant.bits == 4:
        return around(variant.scales, kind, interleaved(row, at, half), scale, zero)
    codes = variant.bytes_at(row, at, half)
    return variant.rounded(kind, [scale * (c.convert(F32, signed=True) - zero) for c in codes])


def by_index(variant: Affine, row: Row) -> None:
    """Write each group's scale and zero, and the address of the inputs' groups."""
    size = SIZE[variant.scales]
    with counted_loop(0, (row.inputs >> 5) / row.share) as at:
        scale = (row.scale + at * size).load(ELEMENT[variant.scales]).widened(variant.scales)
        (row.ready + (at << 2)).store(scale)
        (row.minima + (at << 2)).store(variant.byte(row.other + at))
    row.index_place.store(row.index)


def indexed(variant: Affine, kind: Any, row: Row, at: Value, half: int) -> list[Value]:
    """Decode weights whose inputs are in groups in any order: scale * (code - zero).

    A group that does not exist is read as one within the row's scales.
    """
    last = ((row.inputs >> 5) - 1).convert(I32).broadcast()
    place = row.index_place.load(I64) + ((at + GROUP * half) << 2)
    if variant.bits == 4:
        raw = (row.codes + (at >> 1) + GROUP // 2 * half).load(I8, GROUP // 2)
        order = [i // 2 + GROUP // 2 * (i % 2) for i in range(GROUP)]
        codes = [code.convert(I32) for code in sliced((raw & 15).shuffle(order, raw >> 4))]
    else:
        codes = variant.bytes_at(row, at, half)
    values = []
    for start, code in zip(STARTS, codes, strict=True):
        groups = (place + 4 * start).load(I32, LANES).at_least(0).at_most(last)
        number = scale = zero = code.convert(F32, signed=True)
        for i in NATURAL:  # a gather takes longer on processors that mitigate its side channels
            offset = groups.lane(i).convert(I64) << 2
            scale = scale.with_lane(i, (row.ready + offset).load(F32))
            zero = zero.with_lane(i, (row.minima + offset).load(F32))
        values.append(scale * (number - zero))
    return variant.rounded(kind, values)


def affine_name(encoding: str, codes: str, scales: str) -> str:
    """Return the name in FORMATS of an affine encoding with some dtypes."""
    return f"{encoding}.{'int8.' if codes == 'int8' else ''}{scales}"


AFFINE = {f"{kind}{bits}" for kind in KINDS for bits in (4, 8)}
_SCALES = {"float32": F32_KIND, "bfloat16": BF16_KIND, "float16": F16_KIND}
FORMATS: dict[str, Format] = {
    affine_name(f"{kind}{bits}", codes, scales): Affine(kind, bits, of, codes == "int8").format
    for kind in KINDS
    for bits, codes in ((4, "int32"), (8, "int32"), (8, "int8"))
    for scales, of in _SCALES.items()
}
