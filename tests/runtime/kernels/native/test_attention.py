"""Attention in C++: projected heads, and one token's attention worked out by hand."""

from __future__ import annotations

import ctypes
from math import exp

import pytest
import torch
from torch import Tensor

from greenroom.runtime.kernels.dense.kv_rows import FORMATS
from greenroom.runtime.kernels.launch.sequence import address_of, batch_stage
from greenroom.runtime.kernels.native.library import library
from tests.runtime.kernels.native.variants import DTYPES, entries, same_bits

HIDDEN, WIDTH, CONTEXT = 40, 32, 3
QUERIES, KEYS = 4, 2


def draw(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1])).to(dtype)


class Attended:
    """A call of `attend` for q [heads, width] and k, v [key heads, tokens, width], or rows."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor, form: int = 0
    ) -> None:
        (heads, width), (key_heads, context, row) = q.shape, k.shape
        self.out = torch.zeros(len(weight), dtype=q.dtype)
        mixed = torch.zeros(heads * width, dtype=q.dtype)
        numbers = heads * (context + 2 * width) + key_heads * (1 + 64) * width
        scores = torch.full((numbers,), float("nan"))
        matrix = library().structure("Matrix")(base=weight.data_ptr())
        self._alive = q, k, v, weight, bias, mixed, scores, matrix
        self.call = library().structure("AttendCall")(
            context=context, width=width, key_heads=key_heads, group=heads // key_heads
        )
        call = self.call
        call.scale, call.outputs = 0.5, len(weight)
        call.queries, call.keys, call.values = q.data_ptr(), k.data_ptr(), v.data_ptr()
        call.key_row = call.value_row = k.itemsize * row
        call.key_step = call.value_step = context * call.key_row
        call.format = form
        call.scores, call.mixed = scores.data_ptr(), mixed.data_ptr()
        call.matrix, call.bias = ctypes.addressof(matrix), bias.data_ptr()
        call.out = self.out.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_three_tokens_worked_out_by_hand(dtype):
    """The scores are 2, 0 and -2; half of them are the exponents."""
    q, k, v = torch.zeros(1, 16), torch.zeros(1, 3, 16), torch.zeros(1, 3, 16)
    q[0, 5], k[0, :, 5] = 2, torch.tensor([1.0, 0, -1])
    v[0, :, 7] = torch.tensor([1.0, 2, 4])
    weight, bias = torch.eye(16)[[7, 3]], torch.tensor([0.5, 0.25])
    weights = [exp(1), 1, exp(-1)]
    expected = (weights[0] + 2 * weights[1] + 4 * weights[2]) / sum(weights) + 0.5
    for entry in entries("attend", dtype):
        case = Attended(*(each.to(dtype) for each in (q, k, v, weight, bias)))
        entry(address_of(case.call))
        near = 1e-6 if dtype is torch.float32 else 2 ** (-7 if dtype is torch.bfloat16 else -9)
        assert case.out.tolist() == pytest.approx([expected, 0.25], rel=near)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_has_the_same_bits_in_every_library_and_in_a_batch(dtype):
    q, weight, bias = (
        draw(dtype, 2, QUERIES, WIDTH),
        draw(dtype, 70, QUERIES * WIDTH),
        draw(dtype, 70),
    )
    for context in (1, CONTEXT, 70):
        k, v = draw(dtype, 2, 2, KEYS, context, WIDTH).unbind()
        tokens: list[list[Tensor]] = []
        for entry, rows in zip(
            entries("attend", dtype), entries("attend_rows", dtype), strict=True
        ):
            alone, both = (
                [Attended(q[n], k[n], v[n], weight, bias) for n in range(2)] for _ in range(2)
            )
            for case in alone:
                entry(address_of(case.call))
            wide, sums = torch.zeros(2, QUERIES * WIDTH), torch.zeros(2, 70)
            _, call = batch_stage(
                rows, [case.call for case in both], wide.data_ptr(), sums.data_ptr()
            )
            rows(address_of(call))
            tokens += [[case.out for case in cases] for cases in (alone, both)]
        results = [torch.stack(each) for each in tokens]
        assert same_bits(results)
        wide_k, wide_v = (each.double().repeat_interleave(2, 1) for each in (k, v))
        scores = (q.double()[:, :, None] @ wide_k.mT) * 0.5
        expected = (scores.softmax(-1) @ wide_v).flatten(1) @ weight.double().T + bias.double()
        near = 1e-5 if dtype is torch.float32 else 2e-2
        assert (results[0].double() - expected).norm() < near * expected.norm()


@pytest.mark.parametrize("form", FORMATS.values(), ids=list(FORMATS))
@pytest.mark.parametrize("context", [1, 3, 64, 70, 131])
def test_attention_over_quantised_rows_is_that_over_decoded_ones(form, context):
    weight, bias = torch.eye(QUERIES * WIDTH), torch.zeros(QUERIES * WIDTH)
    q, k, v = draw(torch.float32, 3, QUERIES, WIDTH)[0], *draw(
        torch.float32, 2, KEYS, context, WIDTH
    ).unbind()  # fmt: skip
    rows = [form.pack_by_torch(each).contiguous() for each in (k, v)]
    decoded = [form.expand_by_torch(each, WIDTH).contiguous() for each in rows]
    results = []
    for entry in entries("attend", torch.float32):
        for keys_values, number in ((rows, form.number), (decoded, 0)):
            case = Attended(q, *keys_values, weight, bias, number)
            entry(address_of(case.call))
            results.append(case.out)
    assert same_bits(results)


def test_attention_of_infinite_scores_is_no_number():
    q, k, v = torch.ones(1, 16), torch.ones(1, 3, 16), torch.ones(1, 3, 16)
    k[0, 1] = float("inf")
    for entry in entries("attend", torch.float32):
        case = Attended(q, k, v, torch.eye(16), torch.zeros(16))
        entry(address_of(case.call))
        assert case.out.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary", [WIDTH, 12])
def test_projected_heads_have_bias_and_rotation_in_every_library(dtype, rotary):
    """Values are not rotated; elements of a head behind `rotary` are not either."""
    heads = 3  # one of queries, keys and values
    x, weight, bias = (
        draw(dtype, HIDDEN),
        draw(dtype, heads * WIDTH, HIDDEN),
        draw(dtype, heads, WIDTH),
    )
    cos, sin = draw(dtype, rotary).cos(), draw(dtype, rotary).sin()
    matrix = library().structure("Matrix")(base=weight.data_ptr())
    described = (library().structure("Head") * heads)()
    for number, head in enumerate(described):
        head.matrix, head.first = ctypes.addressof(matrix), number * WIDTH
        head.bias, head.rotated = bias[number].data_ptr(), number < 2
    results = []
    for entry in entries("project", dtype):
        out, projected = torch.zeros(heads, WIDTH, dtype=dtype), torch.zeros(heads, WIDTH)
        call = library().structure("ProjectCall")(hidden=HIDDEN, query_heads=1, key_heads=1)
        call.width, call.rotary, call.x = WIDTH, rotary, x.data_ptr()
        call.projected, call.heads = projected.data_ptr(), ctypes.addressof(described)
        call.cos, call.sin = cos.data_ptr(), sin.data_ptr()
        call.queries, call.keys, call.values = (row.data_ptr() for row in out)
        entry(address_of(call))
        results.append(out)
    assert same_bits(results)
    expected = (weight.double() @ x.double()).view(heads, WIDTH) + bias.double()
    for row in expected[:2]:
        first, second = row[:rotary].clone().chunk(2)
        turned = torch.cat([-second, first])
        row[:rotary] = row[:rotary] * cos.double() + turned * sin.double()
    near = 1e-5 if dtype is torch.float32 else 2e-2
    assert (results[0].double() - expected).norm() < near * expected.norm()


@pytest.mark.parametrize("form", FORMATS.values(), ids=list(FORMATS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_projected_keys_and_values_are_quantised_where_they_are_stored(form, dtype):
    """An identity as the matrix of each head: queries stay as they are."""
    x, weight = draw(dtype, WIDTH), torch.eye(WIDTH, dtype=dtype)
    matrix = library().structure("Matrix")(base=weight.data_ptr())
    described = (library().structure("Head") * 3)()
    for head in described:
        head.matrix = ctypes.addressof(matrix)
    for entry in entries("project", dtype):
        query, projected = torch.zeros(WIDTH, dtype=dtype), torch.zeros(3, WIDTH)
        rows = torch.zeros(2, form.row_bytes(WIDTH), dtype=torch.uint8)
        call = library().structure("ProjectCall")(hidden=WIDTH, query_heads=1, key_heads=1)
        call.width, call.x, call.format = WIDTH, x.data_ptr(), form.number
        call.projected, call.heads = projected.data_ptr(), ctypes.addressof(described)
        call.queries, call.keys, call.values = (each.data_ptr() for each in (query, *rows))
        entry(address_of(call))
        assert torch.equal(query, x)
        assert torch.equal(rows, form.pack_by_torch(x).expand(2, -1))
