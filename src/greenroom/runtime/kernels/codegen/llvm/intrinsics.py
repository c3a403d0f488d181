"""Numba intrinsics that are made of LLVM values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from greenroom.runtime.kernels.codegen.llvm.values import SIZE, Value


def inline(signature: Any, emit: Callable[..., Value | None]) -> Any:
    """Define a Numba intrinsic by LLVM code that is emitted at each call.

    `emit` takes the arguments' values and returns the result's value, or None."""

    def call(context: Any, b: Any, sig: Any, args: Any) -> Any:
        result = emit(*(Value(b, arg) for arg in args))
        return context.get_dummy_value() if result is None else result.ir

    return signature, call


def outlined(signature: Any, name: str, emit: Callable[..., None]) -> Any:
    """Define a Numba intrinsic by an LLVM function that all callers share.

    Long code, such as that of a tile, would be compiled anew for each call if it were inlined.
    `emit` takes the int64 arguments, and the elements of arguments that are tuples."""

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
