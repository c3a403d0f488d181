"""Linear layers in C++: products with plain and encoded matrices, and decoded rows."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from greenroom.core.layout import SlotLayout
from greenroom.runtime.kernels.dense.stored import FEW, StoredMatrix, product_scratch
from greenroom.runtime.kernels.matrix import MatrixProduct
from greenroom.runtime.kernels.native.library import library
from tests.runtime.kernels.native.variants import DTYPES, LIBRARIES, entries, same_bits

ROWS = 5  # a tile and a row besides
OUTPUTS = 70  # more than a thread claims at a time
WIDTHS = (7, 16, 40, 96)


def draw(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def products(x: Tensor, matrices: list[object], **fields: int) -> Iterator[Tensor]:
    """The product of x with a matrix, by each library and on one and several threads."""
    rows, inputs = x.shape
    for matrix, entry in zip(matrices, entries("linear", x.dtype), strict=True):
        for threads in (False, True):
            out = torch.zeros(rows, OUTPUTS, dtype=x.dtype)
            call = library().structure("LinearCall")(outputs=OUTPUTS, inputs=inputs, rows=rows)
            call.matrix, call.x = ctypes.addressof(matrix), x.data_ptr()
            call.out = out.data_ptr()
            for name, value in fields.items():
                setattr(call, name, value)
            entry(ctypes.addressof(call), threads)
            yield out


def one(x: Tensor, matrices: list[object], bias: Tensor) -> Tensor:
    """The first library's product of x with a matrix, on one thread."""
    return next(products(x, matrices, bias=bias.data_ptr()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_products_have_the_same_bits_in_every_library(dtype):
    """An output depends on its row only.

    Products with inputs in float32 have the same bits, except those of bfloat16, which has pairs.
    """
    for width in WIDTHS:
        x, weight, bias = draw(dtype, ROWS, width), draw(dtype, OUTPUTS, width), draw(dtype, 70)
        matrices = [library().structure("Matrix")(base=weight.data_ptr())] * len(LIBRARIES)
        wide, sums = x.float(), torch.zeros(ROWS, OUTPUTS)
        both = {"wide": wide.data_ptr(), "sums": sums.data_ptr()}
        results = list(products(x, matrices, bias=bias.data_ptr()))
        results.append(torch.cat([one(row[None], matrices, bias) for row in x]))
        floats = list(products(x, matrices, bias=bias.data_ptr(), **both))
        assert same_bits(floats)
        assert same_bits([*results, *(floats if dtype is not torch.bfloat16 else ())])
        exact = x.double() @ weight.double().T
        near = 1e-5 if dtype is torch.float32 else 2 ** (-7 if dtype is torch.bfloat16 else -9)
        torch.testing.assert_close(
            results[0].double(), exact + bias.double(), rtol=near, atol=near / 8
        )
        torch.testing.assert_close(sums.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_in_float32_are_those_that_are_rounded(dtype):
    """Also without float32 inputs, and without memory for rounded outputs."""
    for width in WIDTHS:
        x, weight = draw(dtype, ROWS, width), draw(dtype, OUTPUTS, width)
        matrices = [library().structure("Matrix")(base=weight.data_ptr())] * len(LIBRARIES)
        rounded = next(products(x, matrices))
        found = []
        for out in (True, False):
            for _ in LIBRARIES:
                sums = torch.zeros(ROWS, OUTPUTS)
                fields = {"sums": sums.data_ptr(), **({} if out else {"out": 0})}
                last = list(products(x, matrices, **fields))
                assert all(torch.equal(each, rounded if out else each * 0) for each in last)
                found.append(sums)
        assert same_bits(found)
        assert torch.equal(found[0].to(dtype), rounded)


def stored_matrix(dtype: torch.dtype) -> StoredMatrix:
    """A matrix of Q8_0 blocks with random codes and scales."""
    layout = SlotLayout.pack([("weight", (OUTPUTS, 3 * 34), "uint8")], {"weight": "q8_0"}, "uint8")
    matrix = StoredMatrix(layout, dtype)
    (codes,) = matrix.allocate()
    random = torch.Generator().manual_seed(0)
    codes.copy_(torch.randint(256, codes.shape, generator=random, dtype=torch.uint8))
    scales = torch.rand(OUTPUTS, 3, generator=random).half().view(torch.uint8).view(-1, 3, 2)
    codes.view(-1, 3, 34)[:, :, :2] = scales
    return matrix


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_encoded_products_are_those_of_the_decoded_matrix_in_every_library(dtype):
    """With weights rounded to the model's type."""
    stored = stored_matrix(dtype)
    (_, inputs), product = stored.shape, MatrixProduct(stored.spec, dtype, kernels="rounded")
    kind = str(dtype).removeprefix("torch.")
    x, weight = draw(dtype, ROWS, inputs), stored.decode()
    plain = library().structure("Matrix")(base=weight.data_ptr())
    encoded = [
        library().structure("Matrix")(
            format=each.address(f"format_q8_0_{kind}"),
            layout=product.arguments[1],
            base=stored.address,
        )
        for each in LIBRARIES
    ]
    stride = 4 * x.numel() + product_scratch(inputs)
    scratch = torch.empty(stride * torch.get_num_threads(), dtype=torch.uint8)
    memory = {"scratch": scratch.data_ptr(), "stride": stride}
    expected = products(x, [plain] * len(LIBRARIES))
    assert same_bits([*expected, *products(x, encoded, **memory)])
    assert torch.equal(stored.rows(3, FEW + 1), weight[3 : FEW + 4])
    assert torch.equal(stored.look_up(torch.tensor([5, 0, 69])), weight[[5, 0, 69]])
