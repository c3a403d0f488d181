"""Formulas over rows of numbers, LANES at a time.

    @over_rows("ff", "f", scalars=1)
    def scaled(kind, x, y, factor): return x * factor + y

    scaled(kind, n, (x, y, out), (factor,))      # in a kernel; addresses, n numbers each

A compiler that sees addresses instead of arrays vectorises some of such loops and not others: the
activation between an expert's projections took as long as its products.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from greenroom.runtime.kernels.codegen.llvm.emit import (
    F32,
    I32,
    I64,
    LANES,
    SIZE,
    broadcast,
    lane_sums,
    lanes_below,
    load,
    narrow,
    outlined,
    splat,
    store,
    vector_of,
    widen,
)

FLOAT = types.float32


class Lanes:
    """A vector of float32 and the builder of code that it is a value of: what formulas are of."""

    __slots__ = ("b", "value")

    def __init__(self, b: Any, value: Any) -> None:
        self.b, self.value = b, value

    def _of(self, other: Lanes | float) -> Any:
        if isinstance(other, Lanes):
            return other.value
        nearest = (
            struct.unpack("<f", struct.pack("<f", other))[0] if math.isfinite(other) else other
        )
        return splat(nearest, self.value.type)

    def _new(self, value: Any) -> Lanes:
        return Lanes(self.b, value)

    def __add__(self, other: Lanes | float) -> Lanes:
        return self._new(self.b.fadd(self.value, self._of(other)))

    def __sub__(self, other: Lanes | float) -> Lanes:
        return self._new(self.b.fsub(self.value, self._of(other)))

    def __mul__(self, other: Lanes | float) -> Lanes:
        return self._new(self.b.fmul(self.value, self._of(other)))

    def __truediv__(self, other: Lanes | float) -> Lanes:
        return self._new(self.b.fdiv(self.value, self._of(other)))

    def under(self, numerator: float) -> Lanes:
        """numerator / this."""
        return self._new(self.b.fdiv(self._of(numerator), self.value))

    def __neg__(self) -> Lanes:
        return self._new(self.b.fneg(self.value))

    def at_most(self, limit: Lanes | float) -> Lanes:
        """The limit where this is greater; what is no number stays."""
        greater = self.b.fcmp_ordered(">", self.value, self._of(limit))
        return self._new(self.b.select(greater, self._of(limit), self.value))

    def at_least(self, limit: Lanes | float) -> Lanes:
        """The limit where this is smaller; what is no number stays."""
        smaller = self.b.fcmp_ordered("<", self.value, self._of(limit))
        return self._new(self.b.select(smaller, self._of(limit), self.value))

    def rounded(self, kind: Any) -> Lanes:
        """To the nearest number of a weight type."""
        return self._new(widen(self.b, kind, narrow(self.b, kind, self.value)))

    def exp(self) -> Lanes:
        """exp within about one unit in the last place; above 88.7 infinity (Cephes)."""
        b = self.b
        y = self.at_least(-87.0).at_most(88.72)
        shifted = y * 1.44269504088896341 + 12582912.0
        n = shifted - 12582912.0
        r = y - n * 0.693359375 - n * -2.12194440e-4
        p: Lanes = r * 1.9875691500e-4 + 1.3981999507e-3
        for term in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = p * r + term
        p = p * r * r + r + 1.0
        # 2^n in two factors: n may be 128. The integer n sits in the low bits of `shifted`.
        whole = vector_of(I32)
        power = b.shl(b.bitcast(shifted.value, whole), splat(23, whole))
        scale = b.bitcast(b.add(power, splat(0x3F000000, whole)), vector_of(F32))
        p = p * self._new(scale) * 2.0
        beyond = b.fcmp_ordered(">", self.value, self._of(88.7228))
        return self._new(b.select(beyond, self._of(math.inf), p.value))


Formula = Callable[..., "Lanes | tuple[Lanes, ...]"]


def _read(b: Any, letter: str, kind: Any, address: Any, at: Any, left: Any) -> Lanes:
    """LANES numbers of a row from number `at` on, of which `left` exist (None: all)."""
    if letter != "2":
        mask = None if left is None else lanes_below(b, left)
        of = kind if letter == "k" else FLOAT
        return Lanes(b, load(b, of, b.add(address, b.mul(at, I64(SIZE[of]))), mask))
    halves, last = [], b.mul(I64(LANES) if left is None else left, I64(2))
    for half in range(2):  # what follows the last of every two may be nobody's
        place = b.add(address, b.mul(at, I64(8)))
        mask = lanes_below(b, b.sub(last, I64(1 + half * LANES)))
        halves.append(load(b, FLOAT, b.add(place, I64(4 * LANES * half)), mask))
    picks = ir.Constant(vector_of(I32), list(range(0, 2 * LANES, 2)))
    return Lanes(b, b.shuffle_vector(*halves, picks))


def over_rows(sources: str, targets: str, scalars: int = 0) -> Callable[[Formula], Any]:
    """A decorator that makes of a formula a loop over rows: `f(kind, n, places, values)`.

    sources: what each row is that the formula is given: "f" float32, "k" of the model's type,
             "2" every second one of a float32 row
    targets: as what its results are stored: "f", or "k", rounded; a target may be a source
    scalars: how many float32 numbers follow; where there are none, so does no tuple of `values`

    The formula is given the kind, the rows and the numbers, all but the first as `Lanes`.
    """

    def decorate(formula: Formula) -> Any:
        def emit(b: Any, sig: Any, args: Any) -> None:
            kind, (n, *rest) = sig.args[0], args
            places, numbers = rest[: len(sources + targets)], rest[len(sources + targets) :]
            given = [Lanes(b, broadcast(b, number)) for number in numbers]

            def turn(at: Any, left: Any) -> None:
                rows = [
                    _read(b, letter, kind, place, at, left)
                    for letter, place in zip(sources, places, strict=False)
                ]
                made = formula(kind, *rows, *given)
                results = made if isinstance(made, tuple) else (made,)
                mask = None if left is None else lanes_below(b, left)
                for letter, place, one in zip(
                    targets, places[len(sources) :], results, strict=True
                ):
                    of = kind if letter == "k" else FLOAT
                    value = narrow(b, of, one.value)
                    store(b, value, b.add(place, b.mul(at, I64(SIZE[of]))), mask)

            left = b.and_(n, I64(LANES - 1))
            whole = b.sub(n, left)
            with cgutils.for_range_slice(b, I64(0), whole, I64(LANES), I64) as (at, _):
                turn(at, None)
            with b.if_then(b.icmp_signed(">", left, I64(0)), likely=False):
                turn(whole, left)

        places_of = types.UniTuple(types.int64, len(sources + targets))
        call = outlined(f"{formula.__name__}.{sources}.{targets}", emit)
        if not scalars:

            @intrinsic
            def plain(typingctx: Any, kind: Any, n: Any, places: Any) -> Any:
                return types.void(kind, types.int64, places_of), call

            return plain
        values_of = types.UniTuple(types.float32, scalars)

        @intrinsic
        def with_numbers(typingctx: Any, kind: Any, n: Any, places: Any, values: Any) -> Any:
            return types.void(kind, types.int64, places_of, values_of), call

        return with_numbers

    return decorate


@intrinsic
def exponentials(typingctx: Any, kind: Any, n: Any, x: Any, scale: Any, out: Any) -> Any:
    """out[:n] = exp(scale * (x - the largest)), float32, of n numbers of `kind`; returns their sum,
    which is no number where one of them is none or where the largest is infinite."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        kind, (_, n, x, scale, out) = sig.args[0], args
        left = b.and_(n, I64(LANES - 1))
        whole = b.sub(n, left)
        minus, nothing = (ir.Constant(vector_of(F32), [v] * LANES) for v in (-math.inf, 0.0))
        top, total = (cgutils.alloca_once_value(b, value) for value in (minus, nothing))
        factor = Lanes(b, broadcast(b, scale))

        def each(turn: Callable[[Any, Any], None]) -> None:
            with cgutils.for_range_slice(b, I64(0), whole, I64(LANES), I64) as (at, _):
                turn(at, None)
            with b.if_then(b.icmp_signed(">", left, I64(0)), likely=False):
                turn(whole, left)

        def there(left: Any, value: Any, other: Any) -> Any:
            return value if left is None else b.select(lanes_below(b, left), value, other)

        def compare(at: Any, left: Any) -> None:
            here = there(left, _read(b, "k", kind, x, at, left).value, minus)
            b.store(Lanes(b, b.load(top)).at_least(Lanes(b, here)).value, top)

        def add(at: Any, left: Any) -> None:
            value = ((_read(b, "k", kind, x, at, left) - largest) * factor).exp().value
            mask = None if left is None else lanes_below(b, left)
            store(b, value, b.add(out, b.mul(at, I64(4))), mask)
            b.store(b.fadd(b.load(total), there(left, value, nothing)), total)

        each(compare)
        largest = Lanes(b, broadcast(b, _largest_lane(b, b.load(top))))
        each(add)
        return b.extract_element(lane_sums(b, [b.load(total)]), I32(0))

    return types.float32(kind, types.int64, types.int64, types.float32, types.int64), emit


def _largest_lane(b: Any, vector: Any) -> Any:
    """The largest of a vector's lanes, which are numbers."""
    width = LANES
    while width > 1:
        width //= 2
        picks = ir.Constant(vector_of(I32), [(i + width) % LANES for i in range(LANES)])
        other = b.shuffle_vector(vector, vector, picks)
        vector = b.select(b.fcmp_ordered(">", other, vector), other, vector)
    return b.extract_element(vector, I32(0))
