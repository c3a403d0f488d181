"""Formulas over rows equal NumPy's at every length, and write only to their rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numba import njit

from greenroom.runtime.kernels.codegen.entries.gating import (
    CLAMPED,
    RELU2,
    SILU,
    SILU_FLOAT,
    activate,
    round_and_add_bias,
)
from greenroom.runtime.kernels.codegen.llvm.lanes import exponentials, over_rows
from greenroom.runtime.kernels.codegen.llvm.target import LANES
from greenroom.runtime.kernels.codegen.llvm.values import I32, Value

F, BF16 = np.float32(0), np.uint16(0)
LENGTHS = [1, LANES - 1, LANES, 2 * LANES + 3]
PADDING = np.float32(-77)


@over_rows("fk2", "fk", scalars=1)
def _mixed(kind, x, y, every_second, factor: Value):
    return (x + y * factor, every_second - x)


@over_rows("ff", "f")
def _selected(kind, x, numbers):
    return x.select_lanes(numbers.bitcast(I32) & (LANES - 1))


@njit
def _run_selected(n, places):
    _selected(F, n, places)


@njit
def _run_mixed(n, places, factor):
    _mixed(BF16, n, places, (factor,))


@njit
def _run_exponentials(n, x, scale, out):
    return exponentials(BF16, n, x, scale, out)


@njit
def _run_activate(code, gate, up, paired, out, n, limit, alpha):
    activate(BF16, code, gate, up, paired, out, n, limit, alpha)


@njit
def _run_finish(row, bias, n, rounds):
    round_and_add_bias(BF16, row, bias, n, rounds)


def bf16(x: np.ndarray) -> np.ndarray:
    """Nearest bfloat16, ties to even, as uint16."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def wide(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def rounded(x: np.ndarray) -> np.ndarray:
    return wide(bf16(x))


def drawn(n: int, seed: int = 0, scale: float = 3) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


def at(*arrays: np.ndarray) -> tuple[int, ...]:
    return tuple(array.ctypes.data for array in arrays)


@pytest.mark.parametrize("n", LENGTHS)
def test_formulas_equal_numpy_and_write_only_to_their_rows(n: int) -> None:
    x, y, pairs = drawn(n), bf16(drawn(n, 1)), drawn(2 * n, 2)
    out, short = np.full(n + 1, PADDING), np.full(n + 1, 7, np.uint16)
    _run_mixed(n, at(x, y, pairs, out, short), np.float32(1.1))
    np.testing.assert_array_equal(out[:n], x + wide(y) * np.float32(1.1))
    np.testing.assert_array_equal(short[:n], bf16(pairs[::2] - x))
    assert out[n] == PADDING
    assert short[n] == 7


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_exponentials_and_their_sum_equal_numpy(n: int, scale: float) -> None:
    x, out = bf16(drawn(n, scale=30)), np.full(n + 1, PADDING)
    total = _run_exponentials(n, *at(x), np.float32(scale), *at(out))
    expected = np.exp(scale * (wide(x).astype(np.float64) - wide(x).max()))
    np.testing.assert_allclose(out[:n], expected, rtol=1e-6, atol=1e-37)
    assert total == pytest.approx(expected.sum(), rel=1e-6)
    assert out[n] == PADDING


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_the_sum_of_exponentials_with_nan_or_infinity_is_nan(odd: float) -> None:
    for place in (0, LANES - 1, LANES + 1):
        x = drawn(LANES + 2)
        x[place] = odd
        total = _run_exponentials(len(x), *at(bf16(x)), np.float32(1), *at(np.empty_like(x)))
        assert math.isnan(total)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return (1 / (1 + np.exp(-x.astype(np.float64)))).astype(np.float32)


def _expected(code: int, gate: np.ndarray, up: np.ndarray, limit: float, alpha: float):
    if code == RELU2:
        return rounded(np.maximum(up, 0) ** 2)
    if code == SILU_FLOAT:
        return rounded(gate * _sigmoid(gate) * up)
    gate, up = np.minimum(gate, np.float32(limit)), np.clip(up, -limit, limit).astype(np.float32)
    if code == SILU:
        return rounded(rounded(gate * _sigmoid(gate)) * up)
    inner = rounded(_sigmoid(rounded(gate * np.float32(alpha))))
    return rounded(rounded(up + 1) * rounded(gate * inner))


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("code", [SILU, SILU_FLOAT, CLAMPED, RELU2])
def test_activations_round_where_eager_does(code: int, paired: bool, n: int) -> None:
    gate, up = rounded(drawn(n, 3, 8)), rounded(drawn(n, 4, 8))
    gate[0], limit, alpha = -200, 7.0, 1.702
    out, both = np.full(n + 1, PADDING), np.stack([gate, up], 1).ravel()
    if paired and code != RELU2:
        places = both.ctypes.data, both.ctypes.data + 4
    else:
        places, paired = at(gate, up), False
    _run_activate(code, *places, paired, *at(out), n, np.float32(limit), np.float32(alpha))
    expected = _expected(code, gate, up, limit, alpha)
    # A last bit of exp may fall on the other side of a rounding, of one that is rounded again.
    np.testing.assert_allclose(out[:n], expected, rtol=2**-6, atol=1e-30)
    assert (out[:n] == expected).mean() >= 0.9
    assert out[n] == PADDING


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_sums_are_rounded_before_and_after_their_bias(biased: bool, rounds: bool) -> None:
    for n in LENGTHS:
        row, bias = np.append(drawn(n), PADDING), bf16(drawn(n, 1))
        expected = row[:n].copy()
        expected = rounded(expected) if rounds else expected
        if biased:
            expected = expected + wide(bias)
            expected = rounded(expected) if rounds else expected
        _run_finish(*at(row), bias.ctypes.data if biased else 0, n, rounds)
        np.testing.assert_array_equal(row, np.append(expected, PADDING))


def test_lanes_are_selected_by_variable_numbers() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(3, LANES)).astype(np.float32)
    numbers = random.integers(0, LANES, x.shape, np.int32)
    out = np.empty_like(x)
    _run_selected(x.size, (x.ctypes.data, numbers.ctypes.data, out.ctypes.data))
    assert np.array_equal(out, np.take_along_axis(x, numbers, axis=1))
