"""The order in which a product reads rows of weights changes no bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from greenroom.runtime.kernels.codegen.llvm import ir
from greenroom.runtime.kernels.codegen.llvm.target import COLUMNS, LANES

BF16, F32 = np.uint16(0), np.float32(0)


def product(in_turn: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(ir, "ROW_BY_ROW", in_turn)
    dot = ir._dot(1, COLUMNS)

    @njit
    def run(w, ld, K, block, carry, x, out):
        dot(BF16, F32, w, ld, K, block, carry, (x,), (out,))

    return run


@pytest.mark.parametrize("columns", [5, LANES, 2 * LANES, 64, 8 * LANES + 3])
def test_rows_read_side_by_side_and_in_turn_give_the_same_bits(columns: int, monkeypatch) -> None:
    random = np.random.default_rng(0)
    weights = random.integers(0x3C00, 0x4100, (COLUMNS + 1, columns)).astype(np.uint16)
    x = random.standard_normal(columns).astype(np.float32)
    wide = (weights[:COLUMNS].astype(np.uint32) << 16).view(np.float32)
    runs = [product(in_turn, monkeypatch) for in_turn in (False, True)]
    for block in (columns, 64):
        for carry in (0, 1):
            outputs = []
            for run in runs:
                out = np.arange(COLUMNS + 1, dtype=np.float32)
                at = weights.ctypes.data, 2 * columns, columns, block, carry, x.ctypes.data
                run(*at, out.ctypes.data)
                outputs.append(out)
            np.testing.assert_array_equal(*outputs)
            np.testing.assert_allclose(
                outputs[0][:COLUMNS], wide @ x + carry * np.arange(COLUMNS), rtol=2e-4, atol=2e-3
            )
            assert outputs[0][COLUMNS] == COLUMNS
