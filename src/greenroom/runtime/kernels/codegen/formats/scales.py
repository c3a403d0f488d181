"""Rows of quantised weights, and LLVM code that writes a row's scales as float32.

Each encoding has a function `prepare(row)` (families/), which emits code that writes scales to
`row.ready` and minima to `row.minima`. Converting a whole row of scales at a time costs less than
converting each scale when its weights are decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from greenroom.runtime.kernels.codegen.llvm.target import LANES
from greenroom.runtime.kernels.codegen.llvm.values import (
    F16_KIND,
    F32,
    Value,
    below_or_all,
    counted_loop,
)


@dataclass(frozen=True, slots=True)
class Row:
    """The addresses of a row of quantised weights and its scales, in LLVM code.

    codes:  the row's codes
    ready:  memory for the scales in float32, at most one for 16 inputs; the minima, if the encoding
            has them, begin inputs / 4 bytes later
    inputs: number of the row's elements
    scale:  the row's first scale, if scales are a separate tensor
    share:  number of groups of 32 inputs with one scale, if that differs between models
    other:  the row's part of the second tensor that is stored with the codes, if there is one
    powers: float32 factors that the scales are multiplied by, or None
    index:  the same of the third tensor: the int32 group of each of the row's inputs
    """

    codes: Value
    ready: Value
    inputs: Value
    scale: Value | None = None
    share: Value | None = None
    powers: Value | None = None
    other: Value | None = None
    index: Value | None = None

    @property
    def minima(self) -> Value:
        """Return the address of a row's minima in float32."""
        return self.ready + (self.inputs >> 2)

    @property
    def index_place(self) -> Value:
        """Return the place behind the minima where `prepare` stores the address `index`."""
        return self.ready + (self.inputs >> 1)

    def put(
        self, at: Value, scales: Value, minima: Value | None = None, left: Value | None = None
    ) -> None:
        """Write vectors of scales and minima, from index `at` of a row on.

        Scales are multiplied by the row's `powers` if there are any. Only the powers of the first
        `left` scales are read; the products of all others are 0.
        """
        if self.powers is not None:
            mask = below_or_all(left, scales.lanes)
            scales *= (self.powers + (at << 2)).load(F32, scales.lanes, mask)
        (self.ready + (at << 2)).store(scales)
        if minima is not None:  # after the scales, whose last lanes may lie in its place
            (self.minima + (at << 2)).store(minima)

    def scale_at(
        self, at: Value, shift: int, half: int, minimum: bool = False, start: int = 0
    ) -> Value:
        """Load the float32 scale (or minimum) of one input of a row.

        The input has the index at + 32 * half + start. `shift`: a row has one scale for 2^shift
        inputs.
        """
        base = self.minima if minimum else self.ready
        first = 4 * (32 * half + start >> shift)
        return (base + ((at >> shift) << 2) + first).load(F32).broadcast()


def prepare_in_vectors(
    row: Row, count: Value, value: Callable[[Value, Value | None], list[Value]]
) -> None:
    """Write a row's scales as float32, one vector of LANES scales at a time.

    value(at, left) returns vectors of scales and minima, or of scales alone, from index `at` on.
    `left` is None, but if the row has fewer scales than LANES, it is their number. The last vector
    overlaps with the one before.
    """
    # No store is masked: a load soon after a masked store waits for the store.

    def put(at: Value, left: Value | None) -> None:
        row.put(at, *value(at, left), left=left)

    left = count & (LANES - 1)
    with count.b.if_else((count >= LANES).ir) as (many, few):
        with many:
            with counted_loop(0, count - left, LANES) as at:
                put(at, None)
            with count.b.if_then((left > 0).ir):
                put(count - LANES, None)
        with few:
            put(count.constant(0), count)


def half_floats(raw: Value) -> Value:
    """Convert float16 bits to float32."""
    return raw.widened(F16_KIND)
