"""A router's products for a few rows, compiled: `scores`. Made of the same products as the rest."""

from __future__ import annotations

import numpy as np
from numba import njit

from greenroom.runtime.kernels.codegen.llvm.ir import (
    COLUMNS,
    address_of,
    dot_1x1,
    dot_1x4,
    size_of,
    word,
)

W, EXPERTS, HIDDEN, X, OUT, ROWS = range(6)  # the words
F = np.float32(0)


@njit(inline="always")
def _row(kind, w, x, out, experts, hidden):
    size = size_of(kind) * hidden
    whole = experts - experts % COLUMNS
    for n in range(0, whole, COLUMNS):
        dot_1x4(kind, F, w + n * size, size, hidden, hidden, 0, (x,), (out + 4 * n,))
    for n in range(whole, experts):
        dot_1x1(kind, F, w + n * size, size, hidden, hidden, 0, (x,), (out + 4 * n,))


def scores(kind):
    """out [M, N] = x [M, K] @ w [N, K].T; x and out are float32, w is of the model's type."""

    def enter(pointer):
        p = address_of(pointer)
        experts, hidden = word(p, EXPERTS), word(p, HIDDEN)
        for m in range(word(p, ROWS)):
            x, out = word(p, X) + 4 * m * hidden, word(p, OUT) + 4 * m * experts
            _row(kind, word(p, W), x, out, experts, hidden)

    return enter
