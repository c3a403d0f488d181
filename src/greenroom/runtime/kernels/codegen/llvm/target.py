"""The processor that Numba compiles for, and the sizes of tiles and vectors that suit it."""

from __future__ import annotations

import llvmlite.binding as llvm
from numba import config
from numba.core import codegen


def _target() -> tuple[str, set[str]]:
    """The processor that Numba compiles for, and its features: this one's, unless NUMBA_CPU_NAME,
    NUMBA_CPU_FEATURES or NUMBA_ENABLE_AVX say otherwise."""
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
# Does the processor fetch one stream of memory ahead better than four that it is told of? (AMD's
# read twice as fast; Intel's want to be asked for the next four rows while four are multiplied.)
IN_TURN = _NAME.startswith("znver")
# Bytes beyond the next rows that are asked for too, into the second cache; 0: none. (AMD's first
# cache can wait for fewer lines than a tile of short rows needs.)
BEYOND = 8192 if IN_TURN else 0
