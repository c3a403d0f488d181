"""Products with integers: how near they are, and inputs that are odd, for every format."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.runtime.kernels.codes import planes_of
from tests.runtime.kernels.native.variants import LIBRARIES
from tests.runtime.kernels.widths.formats import (
    EVERY_STYLE,
    ROWS,
    EncodedMatrix,
    FormatCalls,
    same_bits,
    unit_of,
)

STYLES = [style for style in EVERY_STYLE if planes_of(style)]
CASES = [
    pytest.param(style, kernels, id=f"{style}-{kernels}")
    for style in STYLES
    for kernels in ("native", "precise")[: 3 - planes_of(style)]
]
EVERY = pytest.mark.parametrize(("style", "kernels"), CASES)
# Distances from float64 for normal inputs, by planes: of a product with many rows.
NEAR = {1: (3e-3, 8e-3), 2: (2e-5, 1.2e-4)}


class Products:
    """Products of a matrix with any inputs, by every library: [tokens, rows]."""

    def __init__(self, style: object, kernels: str) -> None:
        self.width = -(-512 // unit_of(style)) * unit_of(style)
        self.matrix = EncodedMatrix(style, self.width)
        self.symbol = self.matrix.symbol(kernels, torch.float32)
        self.weights = self.matrix.weights(kernels, torch.float32).double()

    def of(self, x: Tensor) -> np.ndarray:
        first, *others = (
            FormatCalls(of, self.matrix, self.symbol, x).multiply(len(x), 0, ROWS)
            for of in LIBRARIES
        )
        assert all(np.array_equal(first, other, equal_nan=True) for other in others)
        return first

    def normals(self, tokens: int) -> Tensor:
        return torch.randn(tokens, self.width, generator=torch.Generator().manual_seed(0))

    def distance(self, x: Tensor) -> float:
        want = x.double() @ self.weights.T
        return float((torch.from_numpy(self.of(x)) - want).norm() / want.norm())


@EVERY
def test_products_have_the_distance_of_their_inputs(style, kernels):
    least, most = NEAR[planes_of(style, kernels)]
    products = Products(style, kernels)
    assert least < products.distance(products.normals(8)) < most


@pytest.mark.parametrize("style", [s for s in STYLES if planes_of(s) == 1], ids=str)
def test_precise_products_are_30_times_nearer(style):
    native, precise = (Products(style, kernels) for kernels in ("native", "precise"))
    x = native.normals(8)
    assert native.distance(x) > 30 * precise.distance(x)


@EVERY
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_input_that_is_not_finite_makes_its_tokens_products_nan(style, kernels, bad):
    products = Products(style, kernels)
    x = products.normals(5)
    good = products.of(x)
    x[3, -7] = bad
    found = products.of(x)
    assert np.isnan(found[3]).all()
    assert same_bits(np.delete(found, 3, 0), np.delete(good, 3, 0))


@EVERY
def test_inputs_of_zero_give_zero(style, kernels):
    products = Products(style, kernels)
    for value in (0.0, -0.0, 2.0**-110, -(2.0**-149)):
        found = products.of(torch.full((1, products.width), value))
        assert (found.view(np.int32) == 0).all()


@EVERY
@pytest.mark.parametrize("power", [-60, 60])
def test_rows_of_tiny_or_huge_inputs_are_as_precise_as_others(style, kernels, power):
    products = Products(style, kernels)
    x = products.normals(3)
    assert same_bits(products.of(x * 2.0**power), products.of(x) * np.float32(2.0**power))


@EVERY
def test_one_input_is_multiplied_with_its_own_weights(style, kernels):
    """A power of two is packed without an error at each place of a row."""
    products = Products(style, kernels)
    places = torch.arange(0, products.width, 37)
    x = torch.zeros(len(places), products.width)
    x[torch.arange(len(places)), places] = 4.0
    found = np.concatenate([products.of(part) for part in x.split(11)])
    want = 4 * products.weights[:, places].T
    slack = 1e-6 * products.weights.abs().max() + 2e-6 * want.abs()
    assert bool(((torch.from_numpy(found) - want).abs() <= slack).all())
