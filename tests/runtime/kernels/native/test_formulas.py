"""Formulas over rows of numbers equal torch's at every length, and write only to their rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from greenroom.runtime.kernels.activation import CLAMPED, FORMULAS, RELU2, SILU, SILU_FLOAT
from greenroom.runtime.kernels.activation import Activation as Formula
from greenroom.runtime.kernels.launch.sequence import address_of
from greenroom.runtime.kernels.native.library import library
from tests.runtime.kernels.native.variants import DTYPES, entries, same_bits

LANES = 16
LENGTHS = [1, LANES - 1, LANES, 2 * LANES + 3]
PADDING = -77.0
NEAR = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 4e-6}


def draw(dtype: torch.dtype, n: int, seed: int = 0, scale: float = 3) -> Tensor:
    return (torch.randn(n, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def exponentials(x: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return exp(scale * (x - max)) with one number more, and their sum, if libraries agree."""
    results, totals = [], []
    for entry in entries("test_exponentials", x.dtype):
        out = torch.full((len(x) + 1,), PADDING)
        call = library().structure("ExponentialsTest")(n=len(x), scale=scale)
        call.x, call.out = x.data_ptr(), out.data_ptr()
        entry(address_of(call))
        results.append(out)
        totals.append(torch.tensor([call.total]))
    assert same_bits(results)
    assert same_bits(totals)
    return results[0], float(totals[0])


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("scale", [1.0, 0.125])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exponentials_and_their_sum_equal_torch(dtype, scale, n):
    x = draw(dtype, n, scale=30)
    out, total = exponentials(x, scale)
    expected = (scale * (x.double() - x.double().max())).exp()
    torch.testing.assert_close(out[:n].double(), expected, rtol=4e-6, atol=1e-37)
    assert total == pytest.approx(float(expected.sum()), rel=4e-6)
    assert out[n] == PADDING


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_of_exponentials_with_nan_or_infinity_is_nan(dtype, odd):
    for place in (0, LANES - 1, LANES + 1):
        x = draw(dtype, LANES + 2)
        x[place] = odd
        assert math.isnan(exponentials(x, 1)[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_score_of_minus_infinity_has_no_weight(dtype):
    x = torch.tensor([0.0] + [-math.inf] * LANES, dtype=dtype)
    out, total = exponentials(x, 1)
    assert total == pytest.approx(1, abs=1e-30)
    assert out[0] == 1


def projected(
    dtype: torch.dtype, x: Tensor, formula: Formula, bias: Tensor | None, **fields: int
) -> tuple[Tensor, Tensor]:
    """Return an expert's (up projection, activation), each with one number more.

    The expert's matrix is the identity, so its projection is x, [width], before rounding and bias.
    """
    width, inner = len(x), fields["inner"]
    structure, weight = library().structure, torch.eye(width, dtype=dtype)
    numbers = torch.tensor([0, 0, 1])
    first, starts = numbers.data_ptr(), numbers.data_ptr() + 8
    routing = structure("Routing")(count=1, experts=first, starts=starts, tokens=first, rows=first)
    layer = structure("ExpertLayer")(slots=weight.data_ptr(), hidden=width, width=width, **fields)
    for name in ("code", "limit", "alpha"):
        setattr(layer.activation, name, getattr(formula, name))
    layer.bias = None if bias is None else bias.data_ptr()
    results = []
    for entry in entries("compute_group", dtype):
        mid, act = torch.full((width + 1,), PADDING), torch.full((inner + 1,), PADDING)
        scratch, finished = torch.empty(1 << 16), torch.zeros(1, dtype=torch.int64)
        call = structure("GroupCall")(up=1, count=1, experts=first, slots=first, x=x.data_ptr())
        call.layer, call.routing = address_of(layer), address_of(routing)
        call.mid, call.act, call.scratch = mid.data_ptr(), act.data_ptr(), scratch.data_ptr()
        call.finished = finished.data_ptr()
        entry(address_of(call))
        results.append(torch.cat([mid, act]))
    assert same_bits(results)
    return results[0].split([width + 1, inner + 1])


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("paired", [False, True], ids=["rows", "paired"])
@pytest.mark.parametrize("code", [SILU, SILU_FLOAT, CLAMPED, RELU2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_round_where_eager_does(dtype, code, paired, n):
    gate, up = (draw(dtype, n, seed, 8) for seed in (3, 4))
    gate[0], formula = -200, Formula(code, 7.0, 1.702)
    if code == SILU_FLOAT:
        formula = Formula(code)
    x = up if code == RELU2 else torch.stack([gate, up], 1 if paired else 0).flatten()
    _, out = projected(
        dtype, x.float(), formula, None, inner=n, interleaved=paired and code != RELU2
    )
    expected = FORMULAS[code](formula, gate, up)
    # A last bit of exp may fall on the other side of a rounding, of one that is rounded again.
    torch.testing.assert_close(out[:n], expected.float(), rtol=NEAR[dtype], atol=1e-30)
    if dtype is not torch.float32:
        assert (out[:n].to(dtype) == expected).double().mean() >= 0.9
    assert torch.equal(out[:n].to(dtype).float(), out[:n])
    assert out[n] == PADDING


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_rounded_before_and_after_their_bias(dtype, biased, rounds):
    for n in LENGTHS:
        x, bias = draw(torch.float32, n), draw(dtype, n, 1)
        expected = x.to(dtype) if rounds else x
        if biased:
            expected = expected + bias  # float32 if the sum is not rounded
        found, _ = projected(
            dtype, x, Formula(RELU2), bias if biased else None, inner=n, rounds=rounds
        )
        assert torch.equal(found, torch.cat([expected.float(), torch.tensor([PADDING])]))
