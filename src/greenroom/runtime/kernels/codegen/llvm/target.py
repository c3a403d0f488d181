"""Detect the processor that Numba compiles for, and its sizes of tiles and vectors."""

from __future__ import annotations

import llvmlite.binding as llvm
from numba import config
from numba.core import codegen


def _target() -> tuple[str, set[str]]:
    """Return the name and the features of the processor that Numba compiles for.

    The processor is this machine's, unless NUMBA_CPU_NAME, NUMBA_CPU_FEATURES or NUMBA_ENABLE_AVX
    are set.
    """
    flags = config.CPU_FEATURES
    flags = codegen.get_host_cpu_features() if flags is None else flags
    name = config.CPU_NAME or llvm.get_host_cpu_name()
    return name, {flag[1:] for flag in flags.split(",") if flag.startswith("+")}


_NAME, FEATURES = _target()
WIDE = "avx512f" in FEATURES
LANES = 16 if WIDE else 8
ROWS = 4 if WIDE else 2  # of x in the widest tile: 16 (8) accumulators of LANES floats
COLUMNS = 4  # of the result in the widest tile
STRIP = 4  # vectors of columns in the widest tile of a transposed matrix
# Are rows of weights read one after another, with hardware prefetch, instead of four side by side
# with software prefetch? (AMD's processors then read twice as fast; Intel's are slower.)
ROW_BY_ROW = _NAME.startswith("znver")
# Distance in bytes, beyond the next rows, of a second prefetch into the L2 cache; 0: none. (AMD's
# L1 cache has fewer outstanding misses than a tile of short rows needs.)
BEYOND = 8192 if ROW_BY_ROW else 0
