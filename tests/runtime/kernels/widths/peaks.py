"""Reads of memory and products in registers, which measure the processor."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.runtime.kernels.widths.kernel import WalledKernel

UNITS = 3
FACTORS = 13 * 64  # bytes: of the library with the most sums, and one more vector


def check_read(kernel: WalledKernel, nbytes: int) -> Iterator[Tensor]:
    """Every number is added once."""
    numbers = torch.arange(UNITS * nbytes // 4, dtype=torch.int32)
    call = kernel.call(
        "PeakCall", units=UNITS, unit_bytes=nbytes, memory=kernel.place(numbers)
    )  # fmt: skip
    assert call.total == numbers.sum()
    yield torch.tensor(call.total)


def check_multiply(kernel: WalledKernel, units: int) -> Iterator[Tensor]:
    """With factors of 1, the total counts the products; it has two operations for each of them."""
    floats = kernel.symbol == "multiply_floats"
    ones = torch.ones(FACTORS // 4) if floats else torch.ones(FACTORS, dtype=torch.uint8)
    call = kernel.call("PeakCall", units=units, memory=kernel.place(ones))
    assert call.total > 0
    assert call.operations == 2 * call.total
    yield torch.tensor(call.total % 4096)  # libraries have other numbers of sums
