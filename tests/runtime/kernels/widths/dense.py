"""Linear layers, expanded rows, norms and exponentials at one width."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import silu

from greenroom.runtime.kernels.activation import SILU
from greenroom.runtime.kernels.dense.norms import NORMS
from greenroom.runtime.kernels.dense.stored import FEW
from greenroom.runtime.kernels.native.library import library
from tests.runtime.kernels.codes import Style, planes_of
from tests.runtime.kernels.packed import equal, pack
from tests.runtime.kernels.panels import PANELS
from tests.runtime.kernels.widths.kernel import (
    PlacedMatrix,
    WalledKernel,
    is_near,
    is_untouched,
)

OUTPUTS = 70  # more than a thread claims at a time
EPS = 1e-6


def check_linear(kernel: WalledKernel, inputs: int, outputs: int) -> Iterator[Tensor]:
    """Plain products: exact, with inputs of the model's type or converted to float32 once."""
    x, weight, bias = (
        kernel.integers(*shape) for shape in ((7, inputs), (outputs, inputs), (outputs,))
    )
    matrix, sums_at = kernel.plain_matrix(weight), kernel.place(bias)
    for rows, wide, biased, rounds in product((1, 7), (False, True), (False, True), (True, False)):
        if not (wide or rounds):
            continue
        exact = (x[:rows].double() @ weight.double().T).float()
        out, sums = (
            kernel.allocate(rows, outputs, dtype=kernel.dtype),
            kernel.allocate(rows, outputs),
        )
        kernel.call(
            "LinearCall", matrix=matrix, outputs=outputs, inputs=inputs, rows=rows,
            x=kernel.place(x[:rows]), bias=sums_at if biased else 0,
            out=out.data_ptr() if rounds else 0, sums=sums.data_ptr() if wide else 0,
            wide=kernel.place(x[:rows].float()) if wide else 0,
        )  # fmt: skip
        want = (exact + bias.float() if biased else exact).to(kernel.dtype)
        assert torch.equal(out, want) if rounds else is_untouched(out)
        assert torch.equal(sums, exact) if wide else is_untouched(sums)
        yield from (out, sums)


def orders(style: Style) -> tuple[bool, ...]:
    """Is the matrix in panels?"""
    return (False, True) if style.name in PANELS else (False,)


def check_encoded_linear(kernel: WalledKernel, inputs: int, style: Style) -> Iterator[Tensor]:
    """Products with an encoded matrix, as it is and rounded to the model's type."""
    x, bias = kernel.normals(11, inputs), kernel.integers(OUTPUTS)
    kinds = ("native", "precise", "rounded") if planes_of(style) == 1 else ("native", "rounded")
    for kernels, rows, order in product(kinds, (1, 3, 11), orders(style)):
        if order and kernels == "rounded":
            continue
        matrix = PlacedMatrix(kernel, style, (OUTPUTS, inputs), kernels, order)
        out = kernel.allocate(rows, OUTPUTS, dtype=kernel.dtype)
        stride = 4 * rows * inputs + matrix.scratch
        kernel.call(
            "LinearCall", matrix=matrix.address, outputs=OUTPUTS, inputs=inputs, rows=rows,
            x=kernel.place(x[:rows]), bias=kernel.place(bias), out=out.data_ptr(),
            scratch=kernel.scratch(stride), stride=stride,
        )  # fmt: skip
        want = matrix.inputs(x[:rows]) @ matrix.weights.double().T + bias.double()
        assert is_near(out, want, torch.finfo(kernel.dtype).eps, matrix.slack(x[:rows]))
        yield out


def check_expand(kernel: WalledKernel, columns: int, style: Style) -> Iterator[Tensor]:
    """Rows of an encoded matrix: consecutive ones, and those of an index."""
    rows, first = 2 * FEW + 3, 2
    for index, order in product((None, torch.tensor([5, 0, rows + first - 1])), orders(style)):
        matrix = PlacedMatrix(kernel, style, (rows + first, columns), "rounded", order)
        need = matrix.scratch
        chosen = torch.arange(first, first + rows) if index is None else index
        stride = 4 * (1 if index is not None else FEW) * columns + need
        out = kernel.allocate(len(chosen), columns, dtype=kernel.dtype)
        kernel.call(
            "ExpandCall", matrix=matrix.address, rows=len(chosen), columns=columns, first=first,
            index=kernel.place(index), out=out.data_ptr(), scratch=kernel.scratch(stride),
            stride=stride,
        )  # fmt: skip
        assert torch.equal(out, matrix.weights[chosen].to(kernel.dtype))
        yield out


def check_norm(kernel: WalledKernel, columns: int) -> Iterator[Tensor]:
    """Residual sums and norms of one and three rows: exact, since sums of squares are."""
    x, y, weight = (kernel.integers(*shape) for shape in ((3, columns), (3, columns), (columns,)))
    placed_weight = kernel.place(weight)
    for style, rows, adds, norms in product(NORMS, (1, 3), (True, False), (True, False)):
        if not (adds or norms):
            continue
        total, out = (kernel.allocate(rows, columns, dtype=kernel.dtype) for _ in range(2))
        kernel.call(
            "NormCall", x=kernel.place(x[:rows]), y=kernel.place(y[:rows]) if adds else 0,
            sum=total.data_ptr(), out=out.data_ptr() if norms else 0, weight=placed_weight,
            columns=columns, eps=EPS, style=style, more=rows - 1,
        )  # fmt: skip
        want = x[:rows] + y[:rows] if adds else x[:rows]
        assert torch.equal(total, want) if adds else is_untouched(total)
        normal = NORMS[style](want, weight, EPS)
        assert torch.equal(out, normal) if norms else is_untouched(out)
        yield from (total, out)


def check_norm_rows(kernel: WalledKernel, columns: int) -> Iterator[Tensor]:
    """Norms of several tokens, in the model's type and in float32."""
    x, weight = kernel.integers(3, columns), kernel.integers(columns)
    placed_weight = kernel.place(weight)
    for tokens, widens in product((1, 3), (True, False)):
        outs = [kernel.allocate(columns, dtype=kernel.dtype) for _ in range(tokens)]
        wide = kernel.allocate(tokens, columns)
        calls = [
            kernel.structure(
                "NormCall", x=kernel.place(row), out=out.data_ptr(), weight=placed_weight,
                columns=columns, eps=EPS,
            )
            for row, out in zip(x[:tokens], outs, strict=True)
        ]  # fmt: skip
        kernel.call_of_tokens(calls, wide.data_ptr() if widens else 0)
        want, got = NORMS[0](x[:tokens], weight, EPS), torch.stack(outs)
        assert torch.equal(got, want)
        assert torch.equal(wide, want.float()) if widens else is_untouched(wide)
        yield from (got, wide)


def check_activation(kernel: WalledKernel, columns: int) -> Iterator[Tensor]:
    """The gated activation of one and three rows, in memory of its own and in the gate's."""
    formula = library().structure("Activation")(code=SILU, limit=float("inf"))
    near = 2 * torch.finfo(kernel.dtype).eps + 1e-5
    for rows, in_place in product((1, 3), (False, True)):
        gate, up = kernel.normals(rows, columns), kernel.normals(rows, columns)
        out = kernel.allocate(rows, columns, dtype=kernel.dtype)
        if in_place:
            out.copy_(gate)
        kernel.call(
            "ActivateCall", activation=formula, rows=rows, columns=columns, out=out.data_ptr(),
            gate=out.data_ptr() if in_place else kernel.place(gate), up=kernel.place(up),
        )  # fmt: skip
        assert is_near(out, silu(gate.double()) * up.double(), near, 2**-24)
        yield out


def check_exponentials(kernel: WalledKernel, n: int) -> Iterator[Tensor]:
    x, out = kernel.normals(n), kernel.allocate(n)
    call = kernel.call("ExponentialsTest", x=kernel.place(x), n=n, scale=0.5, out=out.data_ptr())
    want = (0.5 * (x.double() - x.double().max())).exp()
    total = torch.tensor(call.total)
    assert is_near(out, want, 4e-6)
    assert is_near(total, want.sum(), 4e-6)
    yield from (out, total)


def check_pack(kernel: WalledKernel, columns: int) -> Iterator[Tensor]:
    """Rows of float32 as groups of integers, in memory of their own and in place."""
    for planes, rows in product((1, 2), (1, 3)):
        x, other = kernel.normals(rows, columns), kernel.allocate(rows, columns)
        same = kernel.allocate(rows, columns).copy_(x)
        for source, out in ((kernel.place(x), other), (same.data_ptr(), same)):
            kernel.call(
                "PackCall", planes=planes, rows=rows, columns=columns, x=source,
                out=out.data_ptr(),
            )  # fmt: skip
            assert equal(out, pack(x, planes), planes)
            yield out
