"""Compile a kernel once per weight type, and keep the machine code on disk where that works."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numba import cfunc, types

from greenroom.runtime.kernels import ir
from greenroom.runtime.kernels.openmp import Body

# A value whose Numba type stands for a weight type; see ir.py.
WITNESS = {
    torch.bfloat16: np.uint16(0),
    torch.float16: np.int16(0),
    torch.float32: np.float32(0),
}


@cache
def _stamp() -> int:
    """A number for the source of all kernels.

    Numba's cache looks at one file's date, so an edit of another file would be missed. As a
    variable that the compiled function closes over, this number is part of the cache's key.
    """
    sources = [path.read_bytes() for path in sorted(Path(ir.__file__).parent.glob("*.py"))]
    return int.from_bytes(hashlib.sha256(b"".join(sources)).digest()[:7], "little")


@cache
def body(kernel: Callable[..., Callable[[int], None]], dtype: torch.dtype, *options: bool) -> Body:
    """`kernel(witness, stamp, *options)`, a function of a pointer, as the body of a region."""
    enter = kernel(WITNESS[dtype], _stamp(), *options)
    signature = types.void(types.voidptr)
    try:
        compiled = cfunc(signature, cache=True)(enter)
    except (RuntimeError, OSError):  # no folder that can be written, or a full disk
        compiled = cfunc(signature)(enter)
    return Body(compiled.address, compiled)
