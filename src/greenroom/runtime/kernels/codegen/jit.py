"""Compile CPU kernels, once for each weight type."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types

from greenroom.core.compiling.compile_cache import entry_point

# A value whose Numba type stands for a weight type (see ir.py).
WITNESS = {"bfloat16": np.uint16(0), "float16": np.int16(0), "float32": np.float32(0)}

EntryFunction = Callable[[int], None]


@cache
def machine_code(kernel: Callable[..., EntryFunction], dtype: str, *options: int | str) -> Any:
    """Compile a kernel to machine code, once for each weight type and options.

    `kernel(witness, *options)` must return a function of one pointer; the witness is a number whose
    Numba type stands for the weight type `dtype`. The result's `.address` is the address of the
    machine code.
    """
    return entry_point(kernel(WITNESS[dtype], *options), types.void(types.voidptr))
