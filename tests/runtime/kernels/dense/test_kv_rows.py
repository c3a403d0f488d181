"""Quantised rows of keys and values: blocks worked out by hand, errors bounded, bits compared."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from greenroom.runtime.kernels.dense.kv_rows import BLOCK, FORMATS, KeyValueFormat
from greenroom.runtime.kernels.launch.sequence import address_of
from greenroom.runtime.kernels.native.library import library
from tests.runtime.kernels.native.variants import DTYPES, entries, same_bits

BOTH = pytest.mark.parametrize("form", FORMATS.values(), ids=list(FORMATS))


def packed(form: KeyValueFormat, x: Tensor) -> Tensor:
    rows = torch.full((*x.shape[:-1], form.row_bytes(x.shape[-1])), 0xEE, dtype=torch.uint8)
    form.pack(x, rows)
    return rows


def one_row(*numbers: float) -> Tensor:
    return torch.tensor(numbers).view(1, 1, 1, -1)


def test_a_block_of_int8_worked_out_by_hand():
    """The largest number is 127 scales of 0.5; halves go to the even code."""
    x = one_row(63.5, -63.5, 0.75, 1.25, *[0.0] * 28)
    rows = packed(FORMATS["int8"], x)[0, 0, 0]
    assert rows[:2].view(torch.bfloat16).item() == 0.5
    assert rows[2:].view(torch.int8).tolist() == [127, -127, 2, 2, *[0] * 28]


def test_a_block_of_int4_worked_out_by_hand():
    """From -1 to 6.5 in steps of a half: the first 16 codes are in low halves of bytes."""
    x = one_row(*(-1 + 0.5 * code for code in range(16)), *[-1.0] * 15, 6.5)
    rows = packed(FORMATS["int4"], x)[0, 0, 0]
    assert rows[:4].view(torch.bfloat16).tolist() == [0.5, -1]
    assert rows[4:].tolist() == [*range(15), 15 | 15 << 4]


@pytest.mark.parametrize(
    ("name", "width", "nbytes"),
    [("int8", 128, 136), ("int8", 16, 34), ("int4", 128, 80), ("int4", 33, 40)],
)
def test_bytes_of_a_row(name, width, nbytes):
    assert FORMATS[name].row_bytes(width) == nbytes


@BOTH
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), width=st.integers(1, 70), power=st.integers(-30, 30))
def test_numbers_come_back_within_half_a_step(form, seed, width, power):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 2, 3, width, generator=random) * 2.0**power
    near = form.expand(packed(form, x), width, torch.float32)
    for start in range(0, width, BLOCK):
        part, got = x[..., start : start + BLOCK], near[..., start : start + BLOCK]
        top = part.abs().amax(-1, keepdim=True)
        step = top / 127 if form.bits == 8 else (part.amax(-1) - part.amin(-1))[..., None] / 15
        # The scale and the offset have 8 significant bits; the last code may be cut off.
        assert ((part - got).abs() <= 0.51 * step + top * 2.0**-8).all()


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 16, 32, 48, 128])
def test_every_library_has_the_bits_of_torch(form, dtype, width):
    """Keys as attention has them: a token's heads lie together."""
    random = torch.Generator().manual_seed(width)
    x = torch.randn(1, 70, 3, width, generator=random).to(dtype).transpose(1, 2)
    x[0, 0, 0], x[0, 1, 1, 0], x[0, 2, 2] = 0, 300, -2.5
    expected = form.pack_by_torch(x)
    decoded = form.expand_by_torch(expected, width)
    for pack, expand in zip(
        entries("pack_keys_values", dtype), entries("expand_keys_values", dtype), strict=True
    ):
        rows, out = torch.zeros_like(expected), torch.zeros(1, 3, 70, width, dtype=dtype)
        for entry, source, target in ((pack, x, rows), (expand, rows, out)):
            call = library().structure("KeyValueCall")(
                heads=3, tokens=70, width=width, format=form.number
            )
            call.source, call.target = source.data_ptr(), target.data_ptr()
            _, call.source_head, call.source_token, _ = (
                step * source.itemsize for step in source.stride()
            )
            _, call.target_head, call.target_token, _ = (
                step * target.itemsize for step in target.stride()
            )
            entry(address_of(call))
        assert same_bits([rows, expected, packed(form, x)])
        assert same_bits([out, decoded.to(dtype), form.expand(rows, width, dtype)])


@BOTH
@pytest.mark.parametrize("fault", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_spoils_its_block_alone(form, fault):
    x = torch.ones(1, 1, 2, 2 * BLOCK)
    x[0, 0, 1, 5] = fault
    for rows in (packed(form, x), form.pack_by_torch(x)):
        near = form.expand(rows, 2 * BLOCK, torch.float32)
        assert near[0, 0, 1, :BLOCK].isnan().all()
        assert near[0, 0, 0].allclose(torch.ones(1), rtol=0.01)
        assert near[0, 0, 1, BLOCK:].allclose(torch.ones(1), rtol=0.01)
