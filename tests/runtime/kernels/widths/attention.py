"""Projections of heads and attention at one width, for one token and for several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from greenroom.runtime.kernels.dense.kv_rows import KeyValueFormat
from greenroom.runtime.kernels.dense.norms import NORMS
from tests.runtime.kernels.codes import Style
from tests.runtime.kernels.widths.kernel import (
    PlacedMatrix,
    WalledKernel,
    is_near,
    is_untouched,
)

QUERY_HEADS, KEY_HEADS = 2, 2
HEADS = QUERY_HEADS + 2 * KEY_HEADS
EPS, GAP = 1e-6, 3  # elements between the keys, and the values, of two heads
TOKENS = 3
CONTEXT_BLOCK = 64  # tokens whose keys, or values, are decoded at a time


@dataclass
class Projection:
    """The weights of a token's queries, keys and values, and what follows their products.

    rotary: elements of a head that are rotated
    style:  of the norms of queries and keys; None: they have none
    kernels: products with an encoded matrix (matrix.py)
    """

    kernel: WalledKernel
    hidden: int
    width: int
    rotary: int
    style: int | None
    encoding: Style | None = None
    kernels: str = "native"

    def __post_init__(self) -> None:
        kernel, shape = self.kernel, (HEADS * self.width, self.hidden)
        self.stride, self.error = 0, 0.0
        if self.encoding is None:
            self.weight = kernel.integers(*shape)
            matrix = kernel.plain_matrix(self.weight)
        else:
            placed = self.placed = PlacedMatrix(kernel, self.encoding, shape, self.kernels)
            self.weight, matrix, self.error = placed.weights, placed.address, placed.error
            self.stride = 8 * self.hidden + placed.scratch
        self.bias = kernel.integers(HEADS, self.width)
        self.norm = kernel.integers(self.width)
        self.cos, self.sin = (
            kernel.normals(TOKENS, self.rotary),
            kernel.normals(TOKENS, self.rotary),
        )
        norm = None if self.style is None else kernel.place(self.norm)
        self.heads = kernel.place_structures(
            [
                kernel.structure(
                    "Head", matrix=matrix, first=n * self.width, bias=kernel.place(self.bias[n]),
                    norm=norm if not self.is_value(n) else 0, rotated=not self.is_value(n),
                )
                for n in range(HEADS)
            ]
        )  # fmt: skip

    def is_value(self, head: int) -> bool:
        return head >= QUERY_HEADS + KEY_HEADS

    def call(self, x: Tensor, token: int) -> tuple[Any, Tensor, list[Tensor]]:
        """Make the call for a token: (call, memory of the sums, queries, keys and values)."""
        kernel, width = self.kernel, self.width
        sums, step = kernel.allocate(HEADS, width), width + GAP
        outs = [kernel.allocate(QUERY_HEADS * width, dtype=kernel.dtype)]
        for _ in range(2):
            outs.append(kernel.allocate((KEY_HEADS - 1) * step + width, dtype=kernel.dtype))
        call = kernel.place_call(
            "ProjectCall", x=kernel.place(x), hidden=self.hidden, query_heads=QUERY_HEADS,
            key_heads=KEY_HEADS, width=width, projected=sums.data_ptr(),
            queries=outs[0].data_ptr(), keys=outs[1].data_ptr(), values=outs[2].data_ptr(),
            key_step=step * kernel.dtype.itemsize, value_step=step * kernel.dtype.itemsize,
            cos=kernel.place(self.cos[token]), sin=kernel.place(self.sin[token]),
            rotary=self.rotary, eps=EPS, style=self.style or 0, heads=self.heads,
            scratch=kernel.scratch(self.stride) if self.stride else 0, stride=self.stride,
        )  # fmt: skip
        return call, sums, outs

    def expected(self, x: Tensor, token: int) -> Tensor:
        """Each head of a token [HEADS, width], in the model's type."""
        x64 = self.placed.inputs(x) if self.encoding else x.double()
        sums = x64 @ self.weight.double().T
        rows = (sums.float().view(HEADS, -1) + self.bias.float()).to(x.dtype)
        turned = rows[:-KEY_HEADS]
        if self.style is not None:
            turned[:] = NORMS[self.style](turned, self.norm, EPS)
        part, half = turned[:, : self.rotary], self.rotary // 2
        other = torch.cat([-part[:, half:], part[:, :half]], 1)
        part[:] = part * self.cos[token] + other * self.sin[token]
        return rows

    def compare(self, x: Tensor, token: int, outs: Sequence[Tensor]) -> None:
        """Compare the results of a token with torch's, and check what lies between heads."""
        want, width = self.expected(x, token), self.width
        got = [outs[0].view(QUERY_HEADS, width)]
        for out in outs[1:]:
            gap = out[width:-width] if KEY_HEADS > 1 else out[:0]
            assert is_untouched(gap)
            got.append(torch.stack([out[:width], out[-width:]]))
        if self.encoding is None:
            assert torch.equal(torch.cat(got), want)
        else:
            lengths = x.double().norm() * self.weight.double().norm()
            near = 4 * torch.finfo(x.dtype).eps
            slack = 4 * self.error * lengths + near * want.abs().max()
            assert is_near(torch.cat(got), want, near, slack)


def check_project(kernel: WalledKernel, projection: Projection) -> Iterator[Tensor]:
    """One token's heads, exact for plain weights."""
    x = kernel.integers(projection.hidden)
    call, _, outs = projection.call(x, 0)
    kernel.enter(call)
    projection.compare(x, 0, outs)
    yield from outs


def check_project_rows(kernel: WalledKernel, projection: Projection) -> Iterator[Tensor]:
    """The heads of several tokens."""
    for tokens in (1, TOKENS):
        x = kernel.integers(tokens, projection.hidden)
        parts = [projection.call(row, token) for token, row in enumerate(x)]
        sums = kernel.allocate(tokens, HEADS * projection.width)
        kernel.call_of_tokens(
            [call for call, _, _ in parts], kernel.place(x.float()), sums.data_ptr()
        )
        for token, (_, unused, outs) in enumerate(parts):
            projection.compare(x[token], token, outs)
            assert is_untouched(unused)
            yield from outs


@dataclass
class Attention:
    """The weights of an output projection, and the sizes of a token's attention.

    form: of quantised keys and values, or None
    """

    kernel: WalledKernel
    width: int
    group: int
    outputs: int
    encoding: Style | None = None
    kernels: str = "native"
    form: KeyValueFormat | None = None

    def __post_init__(self) -> None:
        kernel, self.inputs = self.kernel, KEY_HEADS * self.group * self.width
        self.stride, self.error = 0, 1e-6
        if self.encoding is None:
            self.weight = kernel.integers(self.outputs, self.inputs)
            self.matrix = kernel.plain_matrix(self.weight)
        else:
            placed = PlacedMatrix(kernel, self.encoding, (self.outputs, self.inputs), self.kernels)
            self.placed = placed
            self.weight, self.matrix, self.error = placed.weights, placed.address, placed.error
            self.stride = 8 * self.inputs + placed.scratch
        self.bias = kernel.integers(self.outputs)
        self.placed_bias = kernel.place(self.bias)


class AttentionCall:
    """A call of `attend` for one token, with its inputs and results.

    Keys lie token after token within a head, values head after head within a token.
    """

    def __init__(self, attention: Attention, context: int) -> None:
        kernel, width, group = attention.kernel, attention.width, attention.group
        self.attention, heads, form = attention, KEY_HEADS * group, attention.form
        self.q = kernel.normals(KEY_HEADS, group, width)
        self.k = kernel.normals(KEY_HEADS, context, width)
        self.v = kernel.normals(KEY_HEADS, context, width)
        keys, values = self.k, self.v
        memory = heads * (context + 2 * width) + KEY_HEADS * (1 + CONTEXT_BLOCK) * width
        if form is not None:
            keys, values = (form.pack_by_torch(each) for each in (keys, values))
            self.k, self.v = (form.expand_by_torch(each, width) for each in (keys, values))
        row = keys.shape[-1] * keys.itemsize
        self.mixed = kernel.allocate(attention.inputs, dtype=kernel.dtype)
        self.out = kernel.allocate(attention.outputs, dtype=kernel.dtype)
        self.call = kernel.place_call(
            "AttendCall", queries=kernel.place(self.q), keys=kernel.place(keys.contiguous()),
            values=kernel.place(values.transpose(0, 1)), key_step=context * row, key_row=row,
            value_step=row, value_row=row * KEY_HEADS, format=form.number if form else 0,
            context=context, width=width, key_heads=KEY_HEADS, group=group, scale=0.25,
            scores=kernel.allocate(memory).data_ptr(), mixed=self.mixed.data_ptr(),
            matrix=attention.matrix, outputs=attention.outputs, bias=attention.placed_bias,
            out=self.out.data_ptr(), stride=attention.stride,
            scratch=kernel.scratch(attention.stride) if attention.stride else 0,
        )  # fmt: skip

    def compare(self) -> None:
        """Compare the mixed values with float64, and the outputs with products of these."""
        q, k, v = (each.double() for each in (self.q, self.k, self.v))
        weights = (q @ k.mT * 0.25).softmax(-1)
        near, of = torch.finfo(self.q.dtype).eps, self.attention
        slack = 1e-5 * v.norm()
        assert is_near(self.mixed, (weights @ v).flatten(), near, slack)
        mixed = of.placed.inputs(self.mixed) if of.encoding else self.mixed.double()
        want = mixed @ of.weight.double().T + of.bias.double()
        slack = of.error * self.mixed.double().norm() * of.weight.double().norm(dim=1)
        assert is_near(self.out, want, near, slack)


def check_attend(kernel: WalledKernel, attention: Attention, context: int) -> Iterator[Tensor]:
    """One token's attention over some tokens."""
    case = AttentionCall(attention, context)
    kernel.enter(case.call)
    case.compare()
    yield from (case.mixed, case.out)


def check_attend_rows(kernel: WalledKernel, attention: Attention, context: int) -> Iterator[Tensor]:
    """The attention of several tokens, each over tokens of its own."""
    for tokens in (1, TOKENS):
        cases = [AttentionCall(attention, context + token) for token in range(tokens)]
        wide = kernel.allocate(tokens, attention.inputs)
        sums = kernel.allocate(tokens, attention.outputs)
        calls = [case.call for case in cases]
        kernel.call_of_tokens(calls, wide.data_ptr(), sums.data_ptr())
        assert torch.equal(wide, torch.stack([case.mixed for case in cases]).float())
        for case in cases:
            case.compare()
            yield from (case.mixed, case.out)
