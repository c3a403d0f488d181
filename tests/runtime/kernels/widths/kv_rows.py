"""Rows of quantised keys and values at one width: exact, compared with torch's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from greenroom.runtime.kernels.dense.kv_rows import FORMATS
from tests.runtime.kernels.widths.kernel import WalledKernel

HEADS, TOKENS = 2, 3


def check_pack(kernel: WalledKernel, width: int) -> Iterator[Tensor]:
    """Keys whose heads lie together in a token, into rows of a head."""
    x = kernel.normals(TOKENS, HEADS, width)
    for form in FORMATS.values():
        want = form.pack_by_torch(x.transpose(0, 1)).contiguous()
        out, row = kernel.allocate(*want.shape, dtype=torch.uint8), want.shape[-1]
        kernel.call(
            "KeyValueCall", source=kernel.place(x), source_head=width * x.itemsize,
            source_token=HEADS * width * x.itemsize, target=out.data_ptr(),
            target_head=TOKENS * row, target_token=row, heads=HEADS, tokens=TOKENS, width=width,
            format=form.number,
        )  # fmt: skip
        assert torch.equal(out, want)
        yield out


def check_expand(kernel: WalledKernel, width: int) -> Iterator[Tensor]:
    """Rows of a head, into numbers of the model's type."""
    x = kernel.normals(HEADS, TOKENS, width)
    for form in FORMATS.values():
        rows = form.pack_by_torch(x).contiguous()
        out, row = kernel.allocate(*x.shape, dtype=kernel.dtype), rows.shape[-1]
        kernel.call(
            "KeyValueCall", source=kernel.place(rows), source_head=TOKENS * row, source_token=row,
            target=out.data_ptr(), target_head=TOKENS * width * x.itemsize,
            target_token=width * x.itemsize, heads=HEADS, tokens=TOKENS, width=width,
            format=form.number,
        )  # fmt: skip
        assert torch.equal(out, form.expand_by_torch(rows, width).to(kernel.dtype))
        yield out
