"""Compile a kernel once per weight type, and keep the machine code on disk where that works."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types

from greenroom.core.compiled_files import cfunc
from greenroom.runtime.kernels.source import stamp

# A value whose Numba type stands for a weight type; see ir.py.
WITNESS = {"bfloat16": np.uint16(0), "float16": np.int16(0), "float32": np.float32(0)}

Enter = Callable[[int], None]


@cache
def machine_code(kernel: Callable[..., Enter], dtype: str, *options: int) -> Any:
    """`kernel(witness, stamp, *options)`, a function of a pointer; `.address` is where it lies."""
    enter = kernel(WITNESS[dtype], stamp(), *options)
    signature = types.void(types.voidptr)
    try:
        return cfunc(signature, cache=True)(enter)
    except (RuntimeError, OSError):  # no folder that can be written, or a full disk
        return cfunc(signature)(enter)
