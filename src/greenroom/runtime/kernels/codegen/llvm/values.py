"""LLVM values with Python's operators, and loops over them.

A weight type is a `kind`, the Numba type that stands for it (see ir.py). Its numbers are converted
to float32 when they are loaded and rounded when they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from greenroom.runtime.kernels.codegen.llvm.target import LANES

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F32, F16 = ir.FloatType(), ir.HalfType()
BF16_KIND, F16_KIND, F32_KIND = types.uint16, types.int16, types.float32
ELEMENT = {BF16_KIND: I16, F16_KIND: I16, F32_KIND: F32}
SIZE = {BF16_KIND: 2, F16_KIND: 2, F32_KIND: 4}
NATURAL = tuple(range(LANES))


class Value:
    """A scalar or vector in LLVM code, with the code's builder.

    Operators emit instructions. A Python operand becomes a constant of the value's type; a scalar
    operand of a vector is broadcast. Integers are unsigned except in comparisons and if a method
    says so. An int64 may be an address."""

    __slots__ = ("b", "ir")

    def __init__(self, b: Any, value: Any) -> None:
        self.b, self.ir = b, value

    @property
    def lanes(self) -> int | None:
        """Return the number of lanes of an LLVM vector, or None for a scalar."""
        return getattr(self.ir.type, "count", None)

    @property
    def element(self) -> Any:
        return getattr(self.ir.type, "element", self.ir.type)

    def _new(self, value: Any) -> Value:
        return Value(self.b, value)

    def _shaped(self, element: Any) -> Any:
        """Return this value's type with other elements."""
        return element if self.lanes is None else ir.VectorType(element, self.lanes)

    def constant(self, value: Any, element: Any = None) -> Value:
        """Make an LLVM constant: a vector of some numbers, or one number in this value's shape.

        Elements have this value's element type or the type `element`."""
        element = element or self.element
        if isinstance(value, Sequence):
            return self._new(ir.Constant(ir.VectorType(element, len(value)), list(value)))
        shape = self._shaped(element)
        return self._new(ir.Constant(shape, value if self.lanes is None else [value] * self.lanes))

    def _with(self, other: Any, integers: str, floats: str) -> Value:
        one, two = self, other if isinstance(other, Value) else self.constant(other)
        if one.lanes != two.lanes:
            one, two = (
                v.broadcast(one.lanes or two.lanes) if v.lanes is None else v for v in (one, two)
            )
        make = floats if self.element == F32 else integers
        return self._new(getattr(self.b, make)(one.ir, two.ir))

    def __add__(self, other: Any) -> Value:
        return self._with(other, "add", "fadd")

    def __sub__(self, other: Any) -> Value:
        return self._with(other, "sub", "fsub")

    def __rsub__(self, other: Any) -> Value:
        return self.constant(other) - self

    def __mul__(self, other: Any) -> Value:
        return self._with(other, "mul", "fmul")

    def __truediv__(self, other: Any) -> Value:
        return self._with(other, "udiv", "fdiv")

    def __rtruediv__(self, other: Any) -> Value:
        return self.constant(other) / self

    def __lshift__(self, other: Any) -> Value:
        return self._with(other, "shl", "")

    def __rshift__(self, other: Any) -> Value:
        return self._with(other, "lshr", "")

    def shifted_signed(self, places: int) -> Value:
        """Shift integers to the right, keeping the sign."""
        return self._with(places, "ashr", "")

    def __and__(self, other: Any) -> Value:
        return self._with(other, "and_", "")

    def __or__(self, other: Any) -> Value:
        return self._with(other, "or_", "")

    def __neg__(self) -> Value:
        return self._new(self.b.fneg(self.ir))

    def _compared(self, sign: str, other: Any) -> Value:
        two = other if isinstance(other, Value) else self.constant(other)
        compare = self.b.fcmp_ordered if self.element == F32 else self.b.icmp_signed
        return self._new(compare(sign, self.ir, two.ir))

    def __lt__(self, other: Any) -> Value:
        return self._compared("<", other)

    def __gt__(self, other: Any) -> Value:
        return self._compared(">", other)

    def __ge__(self, other: Any) -> Value:
        return self._compared(">=", other)

    def equals(self, other: Any) -> Value:
        return self._compared("==", other)

    def where(self, condition: Value, other: Any) -> Value:
        """Select this value in lanes where a condition holds, else another value."""
        other = other if isinstance(other, Value) else self.constant(other)
        return self._new(self.b.select(condition.ir, self.ir, other.ir))

    def at_most(self, limit: Any) -> Value:
        """Clamp numbers to at most `limit`; NaN stays."""
        limit = limit if isinstance(limit, Value) else self.constant(limit)
        return limit.where(self > limit, self)

    def at_least(self, limit: Any) -> Value:
        """Clamp numbers to at least `limit`; NaN stays."""
        limit = limit if isinstance(limit, Value) else self.constant(limit)
        return limit.where(self < limit, self)

    def fma(self, factor: Value, addend: Value) -> Value:
        """Compute a fused multiply-add: self * factor + addend, with one rounding."""
        return self.call(f"llvm.fma.v{self.lanes}f32", self.ir.type, factor, addend)

    def call(self, name: str, result: Any, *others: Value) -> Value:
        """Call an LLVM intrinsic with this and other values."""
        args = [value.ir for value in (self, *others)]
        kind = ir.FunctionType(result, [arg.type for arg in args])
        function = cgutils.get_or_insert_function(self.b.module, kind, name)
        return self._new(self.b.call(function, args))

    # Other types and shapes.

    def bitcast(self, element: Any) -> Value:
        """Reinterpret a value's bits as elements of another type.

        The number of lanes changes with the size of the elements."""
        if self.lanes is None:
            return self._new(self.b.bitcast(self.ir, element))
        count = self.lanes * _width(self.element) // _width(element)
        return self._new(self.b.bitcast(self.ir, ir.VectorType(element, count)))

    def convert(self, element: Any, signed: bool = False) -> Value:
        """Convert numbers to another element type.

        `signed`: integers have a sign."""
        source, target = (isinstance(e, ir.IntType) for e in (self.element, element))
        if source and target:
            wider = _width(element) > _width(self.element)
            name = ("sext" if signed else "zext") if wider else "trunc"
        elif source:
            name = "sitofp" if signed else "uitofp"
        else:
            name = "fpext" if _width(element) > _width(self.element) else "fptrunc"
        return self._new(getattr(self.b, name)(self.ir, self._shaped(element)))

    def broadcast(self, lanes: int | None = LANES) -> Value:
        """Copy a scalar to every lane of a vector."""
        shape = ir.VectorType(self.ir.type, lanes)
        one = self.b.insert_element(ir.Constant(shape, ir.Undefined), self.ir, I32(0))
        return self._new(one).shuffle([0] * (lanes or 1))

    def shuffle(self, lanes: Sequence[int], other: Value | None = None) -> Value:
        """Select lanes of one or two vectors, by their numbers.

        Lane numbers from this vector's length on select lanes of the other vector."""
        picks = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        second = self if other is None else other
        return self._new(self.b.shuffle_vector(self.ir, second.ir, picks))

    def lane(self, number: int) -> Value:
        return self._new(self.b.extract_element(self.ir, I32(number)))

    def with_lane(self, number: int, value: Value) -> Value:
        return self._new(self.b.insert_element(self.ir, value.ir, I32(number)))

    def select_lanes(self, numbers: Value) -> Value:
        """Select lanes of a vector by variable numbers, each below this vector's length."""
        selected = self
        for i in range(numbers.lanes or 0):
            lane = self.b.extract_element(self.ir, numbers.lane(i).ir)
            selected = selected.with_lane(i, self._new(lane))
        return selected

    def below(self, lanes: int = LANES) -> Value:
        """Make a mask of a vector's first n lanes; this int64 value is n."""
        return self.constant(list(range(lanes))) < self.broadcast(lanes)

    # Numbers of a weight type, as float32.

    def widened(self, kind: Any) -> Value:
        """Convert loaded weights to float32, exactly."""
        if kind == F32_KIND:
            return self
        if kind == F16_KIND:
            return self.bitcast(F16).convert(F32)
        return (self.convert(I32) << 16).bitcast(F32)

    def narrowed(self, kind: Any) -> Value:
        """Round float32 to the weight type `kind`, ties to even, as torch does.

        Every NaN becomes the same bits in bfloat16."""
        if kind == F32_KIND:
            return self
        if kind == F16_KIND:
            return self.convert(F16).bitcast(I16)
        bits = self.bitcast(I32)
        near = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
        odd = self._new(self.b.fcmp_unordered("uno", self.ir, self.ir))
        return near.constant(0x7FC0).where(odd, near).convert(I16)

    def rounded(self, kind: Any) -> Value:
        """Round float32 to the nearest number of a weight type; it stays float32."""
        return self.narrowed(kind).widened(kind)

    # Addresses.

    def pointer(self, element: Any) -> Any:
        return self.b.inttoptr(self.ir, element.as_pointer())

    def load(self, element: Any, lanes: int | None = None, mask: Value | None = None) -> Value:
        """Load a vector or scalar from this address.

        Masked lanes are 0 and are not read."""
        kind = element if lanes is None else ir.VectorType(element, lanes)
        pointer = self.pointer(kind)
        if mask is None:
            return self._new(self.b.load(pointer, align=1))
        others = (I32(1), mask.ir, ir.Constant(kind, None))
        name = f"llvm.masked.load.v{lanes}{element.intrinsic_name}.p0"
        return self._new(pointer).call(name, kind, *map(self._new, others))

    def weights(self, kind: Any, mask: Value | None = None) -> Value:
        """Load LANES weights from this address, converted to float32."""
        return self.load(ELEMENT[kind], LANES, mask).widened(kind)

    def store(self, value: Value, mask: Value | None = None) -> None:
        """Store a value at this address, except for masked lanes."""
        pointer = self.pointer(value.ir.type)
        if mask is None:
            self.b.store(value.ir, pointer, align=1)
            return
        name = f"llvm.masked.store.v{value.lanes}{value.element.intrinsic_name}.p0"
        value.call(name, ir.VoidType(), *map(self._new, (pointer, I32(1), mask.ir)))

    def prefetch(self, cache: int = 1) -> None:
        """Prefetch the cache line at this address to the L1 or L2 cache.

        An address outside of mapped memory does no harm."""
        others = map(self._new, (I32(0), I32(4 - cache), I32(1)))
        byte = self._new(self.pointer(I8))
        byte.call("llvm.prefetch.p0", ir.VoidType(), *others)

    # Functions of float32.

    def exp(self) -> Value:
        """Compute the exponential function within about 1 ulp (polynomial of Cephes).

        Above 88.7228 the result is infinity."""
        y = self.at_least(-87.0).at_most(88.72)
        shifted = y * 1.44269504088896341 + 12582912.0
        n = shifted - 12582912.0
        r = y - n * 0.693359375 - n * -2.12194440e-4
        p = r * 1.9875691500e-4 + 1.3981999507e-3
        for term in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = p * r + term
        p = p * r * r + r + 1.0
        # 2^n in two factors: n may be 128. The integer n sits in the low bits of `shifted`.
        scale = ((shifted.bitcast(I32) << 23) + 0x3F000000).bitcast(F32)
        return self.constant(float("inf")).where(self > 88.7228, p * scale * 2.0)


class Variable:
    """A mutable variable in LLVM code; `value` loads and stores it."""

    __slots__ = ("_b", "_place")

    def __init__(self, first: Value) -> None:
        self._b, self._place = first.b, cgutils.alloca_once_value(first.b, first.ir)

    @property
    def value(self) -> Value:
        return Value(self._b, self._b.load(self._place))

    @value.setter
    def value(self, value: Value) -> None:
        self._b.store(value.ir, self._place)


def _width(element: Any) -> int:
    return element.width if isinstance(element, ir.IntType) else 32 if element == F32 else 16


@contextmanager
def counted_loop(start: Value | int, stop: Value, step: Value | int = 1) -> Iterator[Value]:
    """Emit an LLVM loop whose body is the code of this context; yield the int64 index."""
    first, last, by = (v if isinstance(v, Value) else stop.constant(v) for v in (start, stop, step))
    with cgutils.for_range_slice(stop.b, first.ir, last.ir, by.ir, I64) as (at, _):
        yield Value(stop.b, at)


def loop_in_units(
    count: Value, unit: int, step: Callable[[Value, Value | None], None], remainder: bool = True
) -> None:
    """Emit an LLVM loop over complete units of a count, then code for the remainder.

    Calls step(at, None) for every complete unit and step(at, left) for the remainder of `left`.
    If `remainder` is False, there is none."""
    left = count & (unit - 1)
    end = count - left if remainder else count
    with counted_loop(0, end, unit) as at:
        step(at, None)
    if not remainder:
        return
    with count.b.if_then((left > 0).ir, likely=False):
        step(end, left)


def below_or_all(left: Value | None, lanes: int = LANES) -> Value | None:
    """Return the mask of the first `left` lanes; None, which masks nothing, if `left` is None."""
    return None if left is None else left.below(lanes)


def lane_sums(vectors: Sequence[Value], groups: int = 1) -> Value:
    """Sum the lanes of each of several vectors, and return the sums as one vector.

    `groups`: number of runs of lanes in a vector that are summed separately; the runs' sums follow
    one another. The order of additions is the same for all vectors: two vectors at a time become
    one, the upper half of each run added to its lower half."""
    width = LANES // groups
    while width > 1:
        others = vectors[1::2] if len(vectors) > 1 else [None]
        vectors = [_halved(*pair, width) for pair in zip(vectors[::2], others, strict=True)]
        width //= 2
    return vectors[0]


def _halved(one: Value, other: Value | None, width: int) -> Value:
    """Fold runs of `width` lanes to half of that, in one vector or two."""
    lanes = (one.lanes or 1) * (1 if other is None else 2)
    low = [start + i for start in range(0, lanes, width) for i in range(width // 2)]
    return one.shuffle(low, other) + one.shuffle([i + width // 2 for i in low], other)
