"""Residual sums and RMSNorms in C++."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from greenroom.runtime.kernels.dense.norms import NORMS
from greenroom.runtime.kernels.launch.openmp import KernelEntry
from greenroom.runtime.kernels.launch.sequence import address_of, batch_stage
from greenroom.runtime.kernels.native.library import library
from tests.runtime.kernels.native.variants import DTYPES, entries, same_bits

WIDTHS = (1, 7, 16, 40, 100)  # with and without a part of a vector at the end
ROWS = 3


def draw(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1])).to(dtype)


def norm_call(x: Tensor, out: Tensor, weight: Tensor, style: int = 0):
    call = library().structure("NormCall")(columns=x.shape[-1], eps=1e-6, style=style)
    call.x, call.out, call.weight = x.data_ptr(), out.data_ptr(), weight.data_ptr()
    call.more = x.numel() // x.shape[-1] - 1
    return call


def run(entry: KernelEntry, call: object) -> None:
    call.cursor = 0
    entry(address_of(call))


@pytest.mark.parametrize("style", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_a_residual_sum_has_the_same_bits_in_every_library(dtype, style):
    near = 1e-6 if dtype is torch.float32 else 2 ** (-7 if dtype is torch.bfloat16 else -9)
    for width in WIDTHS:
        x, y, weight = draw(dtype, ROWS, width), draw(dtype, 2, ROWS, width)[1], draw(dtype, width)
        sums, norms = [], []
        for entry in entries("add_and_norm", dtype):
            total, out = torch.zeros(2, ROWS, width, dtype=dtype).unbind()
            call = norm_call(x, out, weight, style)
            call.y, call.sum = y.data_ptr(), total.data_ptr()
            run(entry, call)
            sums.append(total)
            norms.append(out)
        assert same_bits(sums)
        assert same_bits(norms)
        assert torch.equal(sums[0], (x.float() + y.float()).to(dtype))
        expected = NORMS[style](sums[0].double(), weight.double(), 1e-6)
        torch.testing.assert_close(norms[0].double(), expected, rtol=near, atol=1e-6)


def test_a_sum_without_a_norm_and_a_norm_without_a_sum():
    for entry in entries("add_and_norm", torch.bfloat16):
        x, y, weight, total, out = draw(torch.bfloat16, 5, 1, 40).unbind()
        call = norm_call(x, out, weight)
        expected, before = out.clone(), total.clone()
        call.out, call.y, call.sum = None, y.data_ptr(), total.data_ptr()
        run(entry, call)
        assert torch.equal(out, expected)
        assert torch.equal(total, x + y)
        assert not torch.equal(total, before)
        run(entry, call := norm_call(x, out, weight))
        assert torch.equal(total, x + y)
        run(entry, norm_call(x, expected, weight))
        assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_tokens_have_the_norms_of_each_and_their_float32(dtype):
    x, weight = draw(dtype, ROWS, 40), draw(dtype, 40)
    for one, many in zip(
        entries("add_and_norm", dtype), entries("add_and_norm_rows", dtype), strict=True
    ):
        expected, out = torch.zeros(2, ROWS, 40, dtype=dtype).unbind()
        run(one, norm_call(x, expected, weight))
        wide = torch.zeros(ROWS, 40)
        calls = [norm_call(*rows, weight) for rows in zip(x, out, strict=True)]
        _, call = batch_stage(many, calls, wide.data_ptr())
        many(address_of(call))
        assert torch.equal(out, expected)
        assert torch.equal(wide, expected.float())
