"""How codes of each encoding are multiplied as integers: LLVM code for a turn of 64 or 128 inputs.

`WHOLE` names the encodings. Codes of four to eight bits are multiplied with the bytes or words that
x was turned into (packing.py), and summed exactly, eight or four products to a lane; what a lane
has is then multiplied by a scale in float32. A code may be larger than its weight by an offset:
x times that is subtracted by beginning the sum with it.

Needs AVX-512 with VNNI (`INTEGERS`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from greenroom.runtime.kernels.codegen.formats.expand import E2M1, NAMES
from greenroom.runtime.kernels.codegen.formats.scales import Row
from greenroom.runtime.kernels.codegen.llvm.target import FEATURES, WIDE
from greenroom.runtime.kernels.codegen.llvm.values import F32, I1, I8, I16, I32, Value

INTEGERS = WIDE and {f"avx512{name}" for name in ("bw", "dq", "vl", "vnni")} <= FEATURES
BLOCK = 64  # inputs that are summed on their own where the sums of blocks are asked for
LINE = 64  # bytes of a vector

Left = Value | None  # inputs of the last turn, or None: all of them
Term = tuple[int, Value, Value]  # a block of the turn, a vector, and what it is multiplied by


@dataclass(frozen=True, slots=True)
class Whole:
    """How codes of an encoding are multiplied as integers, `unit` inputs at a turn.

    terms:  (row, at, x, left) -> what the sums grow by; x are the vectors of `pack`
    shift:  one prepared scale for 2^shift inputs
    order:  inputs of a turn as the codes' bytes lie, for x as two bytes; (): x as 16 bits
    offset: what a code is larger by than the weight
    factor: what one of code and offset is, in weights
    apart:  are the first and the last half of `order` different sums?
    minima: are there minima, one for 32 inputs?
    paired: do the halves of a vector belong to two blocks?
    alone:  so little to compute that rows are read one after the other where IN_TURN says so?
    """

    terms: Callable[[Row, Value, list[Value], Left], list[Term]]
    shift: int = 5
    order: tuple[int, ...] = ()
    offset: int = 0
    factor: float = 1.0
    apart: bool = False
    minima: bool = False
    paired: bool = True
    alone: bool = False

    @property
    def unit(self) -> int:
        return len(self.order) or BLOCK

    @property
    def group(self) -> int:
        """Inputs that have one power of two."""
        return max(32, 1 << self.shift)

    @property
    def vectors(self) -> int:
        """Vectors of a turn in packed x: two planes of each half, offsets, sums for minima."""
        if not self.order:
            return 2
        return 4 + (1 + self.apart if self.offset else 0) + self.minima


# Instructions.


def _dot(name: str, total: Value, codes: Value, x: Value) -> Value:
    """Products of small integers, added up in lanes of 32 bits."""
    full, kind = f"llvm.x86.avx512.{name}.512", total.ir.type
    return total.call(full, kind, codes.bits(I32), x.bits(I32))


dot_bytes = partial(_dot, "vpdpbusd")  # codes without, x with a sign
dot_words = partial(_dot, "vpdpwssd")


def zero(beside: Value) -> Value:
    return beside.constant([0] * 16, I32)


def _floats(value: Value) -> Value:
    return value.to(F32, signed=True)


def _block(address: Value, words: int, number: int, left: Left) -> Value:
    """Codes of block `number` of the 32 inputs of a turn, 0 where it does not exist."""
    there = None if left is None or number == 0 else (left > 32 * number).wide(words)
    return address.load(I32, words, there)


def joined(parts: Sequence[Value]) -> Value:
    """Equal vectors, one after another."""
    while len(parts) > 1:
        picks = range(2 * parts[0].lanes)
        parts = [u.pick(picks, v) for u, v in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _halves(raw: Value) -> tuple[Value, Value]:
    """The lower and the upper four bits of bytes."""
    return raw.bits(I8) & 15, (raw.bits(I16) >> 4).bits(I8) & 15


def _scales(
    base: Value, at: Value, left: Left, lanes: Sequence[int], shift: int = 5, first: int = 0
) -> Value:
    """Lane i takes the prepared scale, or minimum, of group first + lanes[i] of a turn.

    lanes[i] is less than 4. The scale is 0 where the row has no such group: codes and x are 0 there
    too, but memory that nobody wrote may hold NaN, and 0 times NaN is NaN.
    """
    place = base + ((at >> shift) << 2) + 4 * first
    if left is None and len(set(lanes)) == 1:
        return (place + 4 * lanes[0]).load(F32).wide()
    there = None if left is None else ((left >> shift) - first).below(4)
    return place.load(I32, 4, there).bits(F32).pick(lanes)


ALL, FOURS = (0,) * 16, tuple(i // 4 for i in range(16))


# Turns.


def times(codes: Value, x: list[Value], side: int, start: Value) -> Value:
    """Codes times one half of a turn's x."""
    return (dot_bytes(zero(codes), codes, x[side]) << 7) + dot_bytes(start, codes, x[2 + side])


def _together(
    read: Any, table: Sequence[int], row: Row, at: Value, x: list[Value], left: Left
) -> list[Term]:
    """Both halves of a turn lie in one vector of sums, four lanes to a group. Codes are what `read`
    gives, or what a table has for them."""
    low, high = read(row, at, left)
    if table:
        name, values = "llvm.x86.avx512.pshuf.b.512", low.constant([*table] * 4)
        low, high = (values.call(name, values.ir.type, code) for code in (low, high))
    upper = dot_bytes(dot_bytes(zero(at), low, x[0]), high, x[1])
    lower = dot_bytes(dot_bytes(x[4], low, x[2]), high, x[3])
    return [(0, _floats((upper << 7) + lower), _scales(row.ready, at, left, FOURS))]


def _neighbours(row: Row, at: Value, left: Left) -> tuple[Value, Value]:
    """Two codes a byte that are neighbours: 64 bytes."""
    mask = None if left is None else (left >> 3).below(16)
    return _halves((row.codes + (at >> 1)).load(I32, 16, mask))


def _blocks(width: int, row: Row, at: Value, left: Left) -> tuple[Value, Value]:
    """The 16 bytes that end each of four blocks of `width` bytes."""
    first = row.codes + (at >> 5) * width + (width - 16)
    return _halves(joined([_block(first + width * i, 4, i, left) for i in range(4)]))


def _blocks_of_five(row: Row, at: Value, left: Left) -> tuple[Value, Value]:
    """q5_0: as `_blocks`, and a word before them whose bit i is the fifth bit of code i."""
    first = row.codes + (at >> 5) * 22 + 2
    words = joined([_block(first + 22 * i, 1, i, left) for i in range(4)])
    low, high = (
        four | four.constant(16).where((words >> shift).to(I16).bits(I1), 0)
        for four, shift in zip(_blocks(22, row, at, left), (0, 16), strict=True)
    )
    return low, high


def _int8(row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    first, total = row.codes + at, zero(at)
    for i in range(2):
        total = dot_words(total, _signed((first + 32 * i).load(I32, 8)), x[i])
    return [(0, _floats(total), _scales(row.ready, at, left, ALL, 6))]


def _q8_0(row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    first, terms = row.codes + at + (at >> 4) + 2, []
    for i in range(2):
        codes = _signed(_block(first + 34 * i, 8, i, left))
        scale = _scales(row.ready, at, left, [i] * 16)
        terms.append((0, _floats(dot_words(zero(at), codes, x[i])), scale))
    return terms


def _signed(raw: Value) -> Value:
    return raw.bits(I8).to(I16, signed=True)


def _super_block(row: Row, at: Value, width: int) -> tuple[Value, Value]:
    """(the block of 256 inputs, which half of it)."""
    return row.codes + (at >> 8) * width, (at >> 7) & 1


def _twice(half: Value) -> Value:
    """Eight words as two halves of a vector, in words of 16 bits."""
    return half.pick([*range(8)] * 2).bits(I16)


def _q4_k(row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    start, side = _super_block(row, at, 144)
    return _with_minima(row, at, _halves((start + 16 + (side << 6)).load(I32, 16)), x, left)


def _q5_k(row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    start, side = _super_block(row, at, 176)
    four = _halves((start + 48 + (side << 6)).load(I32, 16))
    # Bit 4 side + 2 (upper half of the vector) + which half of the codes goes to bit 4.
    fifth = _twice((start + 16).load(I32, 8)) >> (side << 2).to(I16)
    codes = [
        low | ((fifth << ([4 - i] * 16 + [2 - i] * 16)).bits(I8) & 16) for i, low in enumerate(four)
    ]
    return _with_minima(row, at, codes, x, left)


def _with_minima(
    row: Row, at: Value, codes: Sequence[Value], x: list[Value], left: Left
) -> list[Term]:
    """q4_k and q5_k: groups 0 and 2 in one half of a turn, 1 and 3 in the other."""
    terms = []
    for i, code in enumerate(codes):
        scale = _scales(row.ready, at, left, [i] * 8 + [2 + i] * 8)
        terms.append((0, _floats(times(code, x, i, zero(at))), scale))
    return [*terms, (0, x[4].bits(F32), _scales(row.minima, at, left, [0, 1, 2, 3] * 4))]


MINIMA = (0, 1, 10, 11)  # lanes in which packed x has the sums of four groups


def _q6_k(row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    start, side = _super_block(row, at, 210)
    four = _halves((start + (side << 6)).load(I32, 16))
    two = _twice((start + 128 + (side << 5)).load(I32, 8))
    moved = two << ([4] * 16 + [2] * 16), two >> ([0] * 16 + [2] * 16)
    terms = []
    for i, (low, high) in enumerate(zip(four, moved, strict=True)):
        code = low | (high.bits(I8) & 48)
        scale = _scales(row.ready, at, left, FOURS, 4, 4 * i)
        terms.append((i, _floats(times(code, x, i, x[4 + i])), scale))
    return terms


_RUN = range(128)
NEIGHBOURS = (*_RUN[::2], *_RUN[1::2])
# e2m1 codes as twice their values plus 12.
_E2M1 = tuple(12 + sign * int(2 * value) for sign in (1, -1) for value in E2M1)


def _runs(length: int) -> tuple[int, ...]:
    """Runs of inputs take turns in the two halves."""
    return tuple(sorted(_RUN, key=lambda i: (i // length % 2, i)))


def _four_bits(read: Any, table: Sequence[int] = ()) -> Any:
    return partial(_together, read, table)


WHOLE: dict[str, Whole] = {
    "int8": Whole(_int8, shift=6, paired=False, alone=True),
    "q8_0": Whole(_q8_0, paired=False),
    "int4": Whole(_four_bits(_neighbours), order=NEIGHBOURS, offset=8),
    "mxfp4": Whole(_four_bits(_neighbours, _E2M1), order=NEIGHBOURS, offset=12, factor=0.5),
    "q4_0": Whole(_four_bits(partial(_blocks, 18)), order=_runs(16), offset=8),
    "q5_0": Whole(partial(_together, _blocks_of_five, ()), order=_runs(16), offset=16),
    "gguf_mxfp4": Whole(_four_bits(partial(_blocks, 17), _E2M1), order=_runs(16), offset=12),
    "q4_k": Whole(_q4_k, order=_runs(32), apart=True, minima=True),
    "q5_k": Whole(_q5_k, order=_runs(32), apart=True, minima=True),
    "q6_k": Whole(_q6_k, shift=4, order=_runs(64), offset=32, apart=True, paired=False),
}


def whole_of(encoding: Any) -> tuple[str, Whole]:
    name = NAMES[encoding.literal_value]
    return name, WHOLE[name]
