"""Compiled rounding, biases and activations that follow an expert's matrix products.

Every operation is rounded to the model's type, as transformers' separate tensor operations are.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from greenroom.runtime.kernels.codegen.llvm.lanes import over_rows
from greenroom.runtime.kernels.codegen.llvm.values import Value

# Activations with a formula here. RAW: there is none, and the module is called.
RAW, SILU, SILU_FLOAT, CLAMPED, RELU2 = range(5)


@over_rows("f", "f")
def round_row(kind: Any, x: Value) -> Value:
    """Round a row of float32 numbers to the model's type."""
    return x.rounded(kind)


@over_rows("fk", "f")
def add_bias(kind: Any, x: Value, bias: Value) -> Value:
    """Add a bias of the model's type to a row of float32 numbers."""
    return x + bias


@over_rows("fk", "f")
def add_bias_rounded(kind: Any, x: Value, bias: Value) -> Value:
    """Round float32 numbers to the model's type, before and after adding a bias."""
    return (x.rounded(kind) + bias).rounded(kind)


@njit(inline="always")
def round_and_add_bias(kind, gu, bias, n, rounds):
    """Round float32 sums and add a bias in place, as eager PyTorch does.

    Nothing is rounded if `rounds` is 0, and nothing is added if `bias`, an address, is 0.
    """
    if bias != 0 and rounds:
        add_bias_rounded(kind, n, (gu, bias, gu))
    elif bias != 0:
        add_bias(kind, n, (gu, bias, gu))
    elif rounds:
        round_row(kind, n, (gu, gu))


def _silu(kind: Any, gate: Value, up: Value, limit: Value) -> Value:
    gate, up = gate.at_most(limit), up.at_most(limit).at_least(-limit)
    return ((gate / ((-gate).exp() + 1)).rounded(kind) * up).rounded(kind)


def _silu_float(kind: Any, gate: Value, up: Value) -> Value:
    return (gate / ((-gate).exp() + 1) * up).rounded(kind)


def _clamped(kind: Any, gate: Value, up: Value, limit: Value, alpha: Value) -> Value:
    gate, up = gate.at_most(limit), up.at_most(limit).at_least(-limit)
    sigmoid = (1 / ((-(gate * alpha).rounded(kind)).exp() + 1)).rounded(kind)
    return ((up + 1).rounded(kind) * (gate * sigmoid).rounded(kind)).rounded(kind)


@over_rows("f", "f")
def relu2(kind: Any, x: Value) -> Value:
    """Compute the square of ReLU of float32 numbers, rounded to the model's type."""
    positive = x.at_least(0)
    return (positive * positive).rounded(kind)


# Gate and up projection in two rows, or in pairs.
silu, silu_of_pairs = (over_rows(each, "f", 1)(_silu) for each in ("ff", "22"))
silu_float, silu_float_of_pairs = (over_rows(each, "f")(_silu_float) for each in ("ff", "22"))
clamped, clamped_of_pairs = (over_rows(each, "f", 2)(_clamped) for each in ("ff", "22"))


@njit(inline="always")
def activate(kind, code, gate, up, paired, out, n, limit, alpha):
    """Apply an expert's activation to a row of n gate and up projections, in float32.

    code: number of the formula (SILU, SILU_FLOAT, CLAMPED or RELU2)
    paired: gate and up values alternate in one row
    limit, alpha: constants of the formula
    """
    if code == SILU and paired:
        silu_of_pairs(kind, n, (gate, up, out), (limit,))
    elif code == SILU:
        silu(kind, n, (gate, up, out), (limit,))
    elif code == SILU_FLOAT and paired:
        silu_float_of_pairs(kind, n, (gate, up, out))
    elif code == SILU_FLOAT:
        silu_float(kind, n, (gate, up, out))
    elif code == CLAMPED and paired:
        clamped_of_pairs(kind, n, (gate, up, out), (limit, alpha))
    elif code == CLAMPED:
        clamped(kind, n, (gate, up, out), (limit, alpha))
    elif code == RELU2:
        relu2(kind, n, (up, out))
