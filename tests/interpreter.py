"""Triton's interpreter with the rounding and sums of a device, and less to do in each call."""

from __future__ import annotations

from typing import Any

import numpy as np


def improve_interpreter() -> None:
    """Change the interpreter for all tests of a process, if Triton is installed."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    _round_to_bfloat16(interpreter)
    _lay_operands_out_in_rows(interpreter)
    _replace_functions_once(interpreter)


def _round_to_bfloat16(interpreter: Any) -> None:
    """Round to nearest, as devices do: the interpreter cuts float32 off."""
    import torch
    import triton.language as tl

    builder = interpreter.InterpreterBuilder
    cast = builder.cast_impl

    def rounded(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            bits = torch.from_numpy(source.data.copy()).bfloat16().view(torch.uint16).numpy()
            return interpreter.TensorHandle(bits, tl.bfloat16)
        return cast(self, source, target)

    builder.cast_impl = rounded


def _lay_operands_out_in_rows(interpreter: Any) -> None:
    """Let a product's bits depend on values alone: NumPy's BLAS has orders by strides."""
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def of_rows(self: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
        for operand in (a, b):
            operand.data = np.ascontiguousarray(operand.data)
        return dot(self, a, b, total, *options)

    builder.create_dot = of_rows


def _replace_functions_once(interpreter: Any) -> None:
    """Let calls within a kernel replace no functions of the language where its launch has.

    The search of all that the language has is a quarter of the interpreter's time.
    """
    import triton.language as tl

    replace: Any = getattr(interpreter, "_patch_lang", None)
    scope: Any = getattr(interpreter, "_LangPatchScope", None)
    if replace is None or scope is None:  # another version
        return

    def replace_once(function: Any) -> Any:
        names = function.__globals__.values()
        modules = [each for each in (tl, tl.core) if any(each is name for name in names)]
        if any(tl.core.is_builtin(each.load) for each in modules):
            return replace(function)
        return scope()

    interpreter._patch_lang = replace_once
