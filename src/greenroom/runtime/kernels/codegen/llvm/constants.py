"""Constant tables in LLVM code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from greenroom.runtime.kernels.codegen.llvm.values import I64, Value


def constant_table(near: Value, name: str, element: Any, numbers: Sequence[int]) -> Value:
    """Return the address of a table of integers that is part of the compiled code.

    `near` is any value of the code that uses the table. Tables of one name have equal contents.
    """
    module, full = near.b.module, f"greenroom.table.{name}"
    table = module.globals.get(full)
    if table is None:
        kind = ir.ArrayType(element, len(numbers))
        table = ir.GlobalVariable(module, kind, full)
        table.initializer = ir.Constant(kind, list(numbers))
        table.global_constant, table.linkage, table.align = True, "internal", 64
    return Value(near.b, near.b.ptrtoint(table, I64))
