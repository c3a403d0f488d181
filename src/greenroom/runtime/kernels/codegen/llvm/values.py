"""Values of LLVM code with Python's operators, and intrinsics of Numba that are made of them.

A weight type is a `kind`, the Numba type that stands for it (see ir.py); its numbers are widened to
float32 when they are loaded and rounded when they are stored.
"""

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
    """A number or a vector of numbers in LLVM code, and the builder of that code.

    Operators make instructions. A Python number beside a value is a constant of its type, a scalar
    beside a vector stands in every lane. Integers have no sign but in comparisons, and where a
    method says so. An int64 is an address too.
    """

    __slots__ = ("b", "ir")

    def __init__(self, b: Any, value: Any) -> None:
        self.b, self.ir = b, value

    @property
    def lanes(self) -> int | None:
        """How many lanes a vector has; None: a scalar."""
        return getattr(self.ir.type, "count", None)

    @property
    def element(self) -> Any:
        return getattr(self.ir.type, "element", self.ir.type)

    def _new(self, value: Any) -> Value:
        return Value(self.b, value)

    def _shaped(self, element: Any) -> Any:
        """A scalar or vector type like this one's, of other elements."""
        return element if self.lanes is None else ir.VectorType(element, self.lanes)

    def constant(self, value: Any, element: Any = None) -> Value:
        """Numbers as a vector, or one number in the shape of this value; of its elements or of
        others."""
        element = element or self.element
        if isinstance(value, Sequence):
            return self._new(ir.Constant(ir.VectorType(element, len(value)), list(value)))
        shape = self._shaped(element)
        return self._new(ir.Constant(shape, value if self.lanes is None else [value] * self.lanes))

    def _with(self, other: Any, integers: str, floats: str) -> Value:
        one, two = self, other if isinstance(other, Value) else self.constant(other)
        if one.lanes != two.lanes:
            one, two = (
                v.wide(one.lanes or two.lanes) if v.lanes is None else v for v in (one, two)
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
        """Shifted to the right, with the sign."""
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
        """This where a condition holds, and the other where not."""
        other = other if isinstance(other, Value) else self.constant(other)
        return self._new(self.b.select(condition.ir, self.ir, other.ir))

    def at_most(self, limit: Any) -> Value:
        """The limit where this is greater; what is no number stays."""
        limit = limit if isinstance(limit, Value) else self.constant(limit)
        return limit.where(self > limit, self)

    def at_least(self, limit: Any) -> Value:
        """The limit where this is smaller; what is no number stays."""
        limit = limit if isinstance(limit, Value) else self.constant(limit)
        return limit.where(self < limit, self)

    def fma(self, factor: Value, addend: Value) -> Value:
        """self * factor + addend, with one rounding."""
        return self.call(f"llvm.fma.v{self.lanes}f32", self.ir.type, factor, addend)

    def call(self, name: str, result: Any, *others: Value) -> Value:
        """The result of an intrinsic of LLVM of this and other values."""
        args = [value.ir for value in (self, *others)]
        kind = ir.FunctionType(result, [arg.type for arg in args])
        function = cgutils.get_or_insert_function(self.b.module, kind, name)
        return self._new(self.b.call(function, args))

    # Other types and shapes.

    def bits(self, element: Any) -> Value:
        """The same bits as elements of another type, as many as they make."""
        if self.lanes is None:
            return self._new(self.b.bitcast(self.ir, element))
        count = self.lanes * _width(self.element) // _width(element)
        return self._new(self.b.bitcast(self.ir, ir.VectorType(element, count)))

    def to(self, element: Any, signed: bool = False) -> Value:
        """The same numbers as elements of another type; of integers perhaps with a sign."""
        source, target = (isinstance(e, ir.IntType) for e in (self.element, element))
        if source and target:
            wider = _width(element) > _width(self.element)
            name = ("sext" if signed else "zext") if wider else "trunc"
        elif source:
            name = "sitofp" if signed else "uitofp"
        else:
            name = "fpext" if _width(element) > _width(self.element) else "fptrunc"
        return self._new(getattr(self.b, name)(self.ir, self._shaped(element)))

    def wide(self, lanes: int | None = LANES) -> Value:
        """A scalar in every lane."""
        shape = ir.VectorType(self.ir.type, lanes)
        one = self.b.insert_element(ir.Constant(shape, ir.Undefined), self.ir, I32(0))
        return self._new(one).pick([0] * (lanes or 1))

    def pick(self, lanes: Sequence[int], other: Value | None = None) -> Value:
        """These lanes, counted through this vector and another one."""
        picks = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        second = self if other is None else other
        return self._new(self.b.shuffle_vector(self.ir, second.ir, picks))

    def lane(self, number: int) -> Value:
        return self._new(self.b.extract_element(self.ir, I32(number)))

    def with_lane(self, number: int, value: Value) -> Value:
        return self._new(self.b.insert_element(self.ir, value.ir, I32(number)))

    def below(self, lanes: int = LANES) -> Value:
        """A mask of the first `self` (int64) of so many lanes."""
        return self.constant(list(range(lanes))) < self.wide(lanes)

    # Numbers of a weight type, as float32.

    def widened(self, kind: Any) -> Value:
        """Weights as loaded -> float32, exactly."""
        if kind == F32_KIND:
            return self
        if kind == F16_KIND:
            return self.bits(F16).to(F32)
        return (self.to(I32) << 16).bits(F32)

    def narrowed(self, kind: Any) -> Value:
        """float32 -> the nearest `kind`, ties to even, as torch rounds; every NaN becomes one."""
        if kind == F32_KIND:
            return self
        if kind == F16_KIND:
            return self.to(F16).bits(I16)
        bits = self.bits(I32)
        near = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
        odd = self._new(self.b.fcmp_unordered("uno", self.ir, self.ir))
        return near.constant(0x7FC0).where(odd, near).to(I16)

    def rounded(self, kind: Any) -> Value:
        """float32 rounded to the nearest number of a weight type."""
        return self.narrowed(kind).widened(kind)

    # Addresses.

    def pointer(self, element: Any) -> Any:
        return self.b.inttoptr(self.ir, element.as_pointer())

    def load(self, element: Any, lanes: int | None = None, mask: Value | None = None) -> Value:
        """What lies here; lanes beyond the mask are 0 and are not touched."""
        kind = element if lanes is None else ir.VectorType(element, lanes)
        pointer = self.pointer(kind)
        if mask is None:
            return self._new(self.b.load(pointer, align=1))
        others = (I32(1), mask.ir, ir.Constant(kind, None))
        name = f"llvm.masked.load.v{lanes}{element.intrinsic_name}.p0"
        return self._new(pointer).call(name, kind, *map(self._new, others))

    def weights(self, kind: Any, mask: Value | None = None) -> Value:
        """LANES weights that lie here, widened."""
        return self.load(ELEMENT[kind], LANES, mask).widened(kind)

    def store(self, value: Value, mask: Value | None = None) -> None:
        """Put a value here; lanes beyond the mask are not touched."""
        pointer = self.pointer(value.ir.type)
        if mask is None:
            self.b.store(value.ir, pointer, align=1)
            return
        name = f"llvm.masked.store.v{value.lanes}{value.element.intrinsic_name}.p0"
        value.call(name, ir.VoidType(), *map(self._new, (pointer, I32(1), mask.ir)))

    def prefetch(self, cache: int = 1) -> None:
        """Ask for a line, into the first or the second cache; one beyond the end does no harm."""
        others = map(self._new, (I32(0), I32(4 - cache), I32(1)))
        byte = self._new(self.pointer(I8))
        byte.call("llvm.prefetch.p0", ir.VoidType(), *others)

    # Functions of float32.

    def exp(self) -> Value:
        """exp within about one unit in the last place; above 88.7 infinity (Cephes)."""
        y = self.at_least(-87.0).at_most(88.72)
        shifted = y * 1.44269504088896341 + 12582912.0
        n = shifted - 12582912.0
        r = y - n * 0.693359375 - n * -2.12194440e-4
        p = r * 1.9875691500e-4 + 1.3981999507e-3
        for term in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = p * r + term
        p = p * r * r + r + 1.0
        # 2^n in two factors: n may be 128. The integer n sits in the low bits of `shifted`.
        scale = ((shifted.bits(I32) << 23) + 0x3F000000).bits(F32)
        return self.constant(float("inf")).where(self > 88.7228, p * scale * 2.0)


class Variable:
    """A value that code changes: what it is where this is read."""

    __slots__ = ("_b", "_place")

    def __init__(self, first: Value) -> None:
        self._b, self._place = first.b, cgutils.alloca_once_value(first.b, first.ir)

    @property
    def now(self) -> Value:
        return Value(self._b, self._b.load(self._place))

    @now.setter
    def now(self, value: Value) -> None:
        self._b.store(value.ir, self._place)


def _width(element: Any) -> int:
    return element.width if isinstance(element, ir.IntType) else 32 if element == F32 else 16


@contextmanager
def counted(start: Value | int, stop: Value, step: Value | int = 1) -> Iterator[Value]:
    """A loop's body, given its int64 number."""
    first, last, by = (v if isinstance(v, Value) else stop.constant(v) for v in (start, stop, step))
    with cgutils.for_range_slice(stop.b, first.ir, last.ir, by.ir, I64) as (at, _):
        yield Value(stop.b, at)


def in_turns(count: Value, unit: int, turn: Callable[[Value, Value | None], None]) -> None:
    """turn(at, None) for every whole unit of a count, and turn(at, left) for what is left."""
    left = count & (unit - 1)
    whole = count - left
    with counted(0, whole, unit) as at:
        turn(at, None)
    with count.b.if_then((left > 0).ir, likely=False):
        turn(whole, left)


def below_or_all(left: Value | None, lanes: int = LANES) -> Value | None:
    """The mask of a turn: of those that are left, or None: all."""
    return None if left is None else left.below(lanes)


def lane_sums(vectors: Sequence[Value], groups: int = 1) -> Value:
    """The sum of each vector's lanes, as one vector; the order of additions is the same for all.

    `groups`: so many runs of lanes are summed on their own, and follow one another. Two vectors at
    a time become one, the upper half of each run added to its lower half.
    """
    width = LANES // groups
    while width > 1:
        others = vectors[1::2] if len(vectors) > 1 else [None]
        vectors = [_halved(*pair, width) for pair in zip(vectors[::2], others, strict=True)]
        width //= 2
    return vectors[0]


def _halved(one: Value, other: Value | None, width: int) -> Value:
    """Runs of `width` lanes folded to half of that, in one vector or two."""
    lanes = (one.lanes or 1) * (1 if other is None else 2)
    low = [start + i for start in range(0, lanes, width) for i in range(width // 2)]
    return one.pick(low, other) + one.pick([i + width // 2 for i in low], other)


def inline(signature: Any, emit: Callable[..., Value | None]) -> Any:
    """What an intrinsic returns whose code is emit(values of the arguments)."""

    def call(context: Any, b: Any, sig: Any, args: Any) -> Any:
        made = emit(*(Value(b, arg) for arg in args))
        return context.get_dummy_value() if made is None else made.ir

    return signature, call


def outlined(signature: Any, name: str, emit: Callable[..., None]) -> Any:
    """As `inline`, as a function of its own, shared by all callers: a tile is long, and would
    otherwise be compiled anew at each place that it is used. `emit` is given the numbers among the
    arguments, those of tuples too."""

    def call(context: Any, b: Any, sig: Any, args: Any) -> Any:
        flat = []
        for kind, value in zip(sig.args, args, strict=True):
            if isinstance(kind, types.UniTuple):
                flat += cgutils.unpack_tuple(b, value)
            elif kind == types.int64:
                flat.append(value)
        kinds = [str(kind) for kind in sig.args if kind in SIZE]
        full = ".".join(["greenroom", name, *kinds])
        function = b.module.globals.get(full)
        if function is None:
            shape = ir.FunctionType(ir.VoidType(), [value.type for value in flat])
            function = ir.Function(b.module, shape, full)
            function.linkage = "linkonce_odr"
            function.attributes.add("noinline")
            inside = ir.IRBuilder(function.append_basic_block("entry"))
            emit(*(Value(inside, arg) for arg in function.args))
            inside.ret_void()
        b.call(function, flat)
        return context.get_dummy_value()

    return signature, call
