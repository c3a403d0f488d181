"""Compiled formulas over rows of numbers, one vector at a time.

    @over_rows("ff", "f", scalars=1)
    def scaled(kind, x, y, factor): return x * factor + y

    scaled(kind, n, (x, y, out), (factor,))      # in a kernel; addresses, n numbers each

LLVM vectorises only some loops over addresses. Without vectors, the activation between an expert's
projections took as long as the projections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from greenroom.runtime.kernels.codegen.llvm.intrinsics import outlined
from greenroom.runtime.kernels.codegen.llvm.target import LANES
from greenroom.runtime.kernels.codegen.llvm.values import (
    F32,
    F32_KIND,
    SIZE,
    Value,
    below_or_all,
    loop_in_units,
)

Formula = Callable[..., "Value | tuple[Value, ...]"]


def _kind_of(letter: str, kind: Any) -> Any:
    return kind if letter == "k" else F32_KIND


def _read(letter: str, kind: Any, address: Value, at: Value, left: Value | None) -> Value:
    """Load LANES numbers of a row from index `at` on, of which `left` exist (None: all)."""
    if letter != "2":
        of = _kind_of(letter, kind)
        return (address + at * SIZE[of]).weights(of, below_or_all(left))
    # The number after the last pair may lie outside of the row.
    last = (at.constant(LANES) if left is None else left) * 2
    first, second = (
        (address + at * 8 + 4 * start).load(F32, LANES, (last - (1 + start)).below())
        for start in (0, LANES)
    )
    return first.shuffle(range(0, 2 * LANES, 2), second)


def over_rows(sources: str, targets: str, scalars: int = 0) -> Callable[[Formula], Any]:
    """Return a decorator that compiles a vector formula to a loop over rows of memory.

    The loop is called as `f(kind, n, places, values)`, with addresses of n numbers each in
    `places`: input rows, then output rows.

    sources: type of each input row: "f" float32, "k" the model's type, "2" every second number of a
             float32 row
    targets: type of each output row: "f", or "k", rounded; an output may also be an input
    scalars: number of float32 `values`; without any, `f` has no parameter `values`

    The formula takes the kind (the model's type), then the rows and the values as vectors.
    """
    count = len(sources + targets)

    def decorate(formula: Formula) -> Any:
        def code(kind: Any, *more: Any) -> Any:
            def emit(n: Value, *operands: Value) -> None:
                places, numbers = (
                    operands[:count],
                    [number.broadcast() for number in operands[count:]],
                )

                def iteration(at: Value, left: Value | None) -> None:
                    rows = [
                        _read(letter, kind, place, at, left)
                        for letter, place in zip(sources, places, strict=False)
                    ]
                    output = formula(kind, *rows, *numbers)
                    results = output if isinstance(output, tuple) else (output,)
                    ends = zip(targets, places[len(sources) :], results, strict=True)
                    for letter, place, result in ends:
                        of = _kind_of(letter, kind)
                        place += at * SIZE[of]
                        place.store(result.narrowed(of), below_or_all(left))

                loop_in_units(n, LANES, iteration)

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
