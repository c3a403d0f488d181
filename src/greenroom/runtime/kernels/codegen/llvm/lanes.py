"""Formulas over rows of numbers, LANES at a time.

    @over_rows("ff", "f", scalars=1)
    def scaled(kind, x, y, factor): return x * factor + y

    scaled(kind, n, (x, y, out), (factor,))      # in a kernel; addresses, n numbers each

A compiler that sees addresses instead of arrays vectorises some of such loops and not others: the
activation between an expert's projections took as long as its products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from greenroom.runtime.kernels.codegen.llvm.target import LANES
from greenroom.runtime.kernels.codegen.llvm.values import (
    F32,
    F32_KIND,
    SIZE,
    Value,
    Variable,
    below_or_all,
    in_turns,
    inline,
    lane_sums,
    outlined,
)

Formula = Callable[..., "Value | tuple[Value, ...]"]


def _kind_of(letter: str, kind: Any) -> Any:
    return kind if letter == "k" else F32_KIND


def _read(letter: str, kind: Any, address: Value, at: Value, left: Value | None) -> Value:
    """LANES numbers of a row from number `at` on, of which `left` exist (None: all)."""
    if letter != "2":
        of = _kind_of(letter, kind)
        return (address + at * SIZE[of]).weights(of, below_or_all(left))
    # What follows the last of every two may be nobody's.
    last = (at.constant(LANES) if left is None else left) * 2
    first, second = (
        (address + at * 8 + 4 * start).load(F32, LANES, (last - (1 + start)).below())
        for start in (0, LANES)
    )
    return first.pick(range(0, 2 * LANES, 2), second)


def over_rows(sources: str, targets: str, scalars: int = 0) -> Callable[[Formula], Any]:
    """A decorator that makes of a formula a loop over rows: `f(kind, n, places, values)`.

    sources: what each row is that the formula is given: "f" float32, "k" of the model's type,
             "2" every second one of a float32 row
    targets: as what its results are stored: "f", or "k", rounded; a target may be a source
    scalars: how many float32 numbers follow; where there are none, so does no tuple of `values`

    The formula is given the kind, the rows and the numbers, all but the first as vectors.
    """
    count = len(sources + targets)

    def decorate(formula: Formula) -> Any:
        def code(kind: Any, *more: Any) -> Any:
            def emit(n: Value, *rest: Value) -> None:
                places, numbers = rest[:count], [number.wide() for number in rest[count:]]

                def turn(at: Value, left: Value | None) -> None:
                    rows = [
                        _read(letter, kind, place, at, left)
                        for letter, place in zip(sources, places, strict=False)
                    ]
                    made = formula(kind, *rows, *numbers)
                    results = made if isinstance(made, tuple) else (made,)
                    ends = zip(targets, places[len(sources) :], results, strict=True)
                    for letter, place, result in ends:
                        of = _kind_of(letter, kind)
                        place += at * SIZE[of]
                        place.store(result.narrowed(of), below_or_all(left))

                in_turns(n, LANES, turn)

            places_of = types.UniTuple(types.int64, count)
            signature = types.void(kind, types.int64, places_of, *more)
            return outlined(signature, f"{formula.__name__}.{sources}.{targets}", emit)

        if not scalars:

            @intrinsic
            def plain(typingctx: Any, kind: Any, n: Any, places: Any) -> Any:
                return code(kind)

            return plain

        @intrinsic
        def with_numbers(typingctx: Any, kind: Any, n: Any, places: Any, values: Any) -> Any:
            return code(kind, types.UniTuple(types.float32, scalars))

        return with_numbers

    return decorate


@intrinsic
def exponentials(typingctx: Any, kind: Any, n: Any, x: Any, scale: Any, out: Any) -> Any:
    """out[:n] = exp(scale * (x - the largest)), float32, of n numbers of `kind`; returns their sum,
    which is no number where one of them is none or where the largest is infinite."""

    def emit(_: Value, n: Value, x: Value, scale: Value, out: Value) -> Value:
        minus, nothing = (n.constant([v] * LANES, F32) for v in (-math.inf, 0.0))
        top, total, factor = Variable(minus), Variable(nothing), scale.wide()

        def there(left: Value | None, value: Value, other: Value) -> Value:
            return value if left is None else value.where(left.below(), other)

        def compare(at: Value, left: Value | None) -> None:
            top.now = top.now.at_least(there(left, _read("k", kind, x, at, left), minus))

        def add(at: Value, left: Value | None) -> None:
            value = ((_read("k", kind, x, at, left) - largest) * factor).exp()
            (out + at * 4).store(value, below_or_all(left))
            total.now += there(left, value, nothing)

        in_turns(n, LANES, compare)
        largest = _largest_lane(top.now)
        in_turns(n, LANES, add)
        return lane_sums([total.now]).lane(0)

    kinds = kind, types.int64, types.int64, types.float32, types.int64
    return inline(types.float32(*kinds), emit)


def _largest_lane(vector: Value) -> Value:
    """The largest of a vector's lanes, which are numbers, in every lane."""
    width = LANES
    while width > 1:
        width //= 2
        vector = vector.at_least(vector.pick([(i + width) % LANES for i in range(LANES)]))
    return vector
