"""A row of stored weights: where an expander finds its parts, and how it fetches bytes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types

from greenroom.runtime.kernels.codegen.llvm.emit import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    broadcast,
    lanes_below,
    load,
    vector_of,
)

Builder, Value = Any, Any
GROUP = 32  # inputs expanded together
VECTORS = GROUP // LANES
NATURAL = tuple(range(LANES))
F16_KIND, BF16_KIND, F32_KIND = types.int16, types.uint16, types.float32


@dataclass(frozen=True, slots=True)
class Row:
    """Addresses that an expander finds a row's weights by.

    codes:  the row's codes
    scale:  its first scale, where scales are a tensor of their own
    ready:  float32 scales, as `prepare` has written them; where there are minima, they follow at
            `minima`, one for each scale
    inputs: elements of the row
    share:  groups of 32 inputs that have one scale, where that differs between models
    powers: float32 numbers that the prepared scales are multiplied with, or None
    """

    codes: Value
    scale: Value
    ready: Value
    minima: Value
    inputs: Value
    share: Value
    powers: Value | None = None

    def scaled(self, b: Builder, value: Value, at: Value, left: Value | None = None) -> Value:
        """Scales at .. of the row times their powers; 0 beyond those that are left."""
        if self.powers is None:
            return value
        mask = None if left is None else lanes_below(b, left)
        place = at_byte(b, self.powers, b.shl(at, I64(2)))
        return b.fmul(value, load(b, F32_KIND, place, mask, value.type.count))


def constant(values: Sequence[float], element: Any = F32) -> Value:
    return ir.Constant(vector_of(element, len(values)), list(values))


def at_byte(b: Builder, base: Value, *terms: Value | int) -> Value:
    """base plus offsets in bytes."""
    for term in terms:
        base = b.add(base, I64(term) if isinstance(term, int) else term)
    return base


def scalar(b: Builder, address: Value, element: Any) -> Value:
    return b.load(b.inttoptr(address, element.as_pointer()), align=1)


def put_scalar(b: Builder, value: Value, address: Value) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=4)


def bytes_at(b: Builder, address: Value, signed: bool = False, count: int = LANES) -> Value:
    """`count` bytes as int32."""
    pointer = b.inttoptr(address, vector_of(I8, count).as_pointer())
    return (b.sext if signed else b.zext)(b.load(pointer, align=1), vector_of(I32, count))


def float_at(b: Builder, address: Value) -> Value:
    """One float32 in all lanes."""
    return broadcast(b, b.load(b.inttoptr(address, F32.as_pointer()), align=4))


def half_at(b: Builder, address: Value) -> Value:
    """A float16 at any address, as float32."""
    return b.fpext(b.bitcast(scalar(b, address, I16), F16), F32)


def ready_at(
    b: Builder, row: Row, at: Value, shift: int, half: int, minimum: bool = False
) -> Value:
    """The prepared scale (or minimum) of the group at + 32 half, one for 2^shift inputs."""
    base = row.minima if minimum else row.ready
    index = b.lshr(at, I64(shift))
    return float_at(b, at_byte(b, base, b.shl(index, I64(2)), 4 * (32 * half >> shift)))
