"""Products of bfloat16 by pairs: sums by hand, and the same bits by instruction and by FMAs."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from greenroom.runtime.kernels.native.library import library
from tests.runtime.kernels.native.experts import TOP_K, Layer, Step, normals, on_one_thread
from tests.runtime.kernels.native.variants import LIBRARIES, PAIR_FORMS, entries, pair_form

BFLOAT16 = torch.bfloat16
FORMS = [(of, form) for of in LIBRARIES for form in PAIR_FORMS[of.variant]]


def outputs(layer: Layer, x: Tensor, form: bool, of: int = 0) -> tuple[Tensor, Tensor]:
    """The up projections and outputs of tokens that all choose expert 0."""
    step = Step(layer, x, [[0, None]] * len(x), narrow=True)
    with pair_form(LIBRARIES[of], form):
        step.compute(on_one_thread(entries("compute_group", BFLOAT16)[of]))
    return step.mid, step.out[::TOP_K]


@pytest.mark.parametrize(("of", "form"), FORMS, ids=lambda v: getattr(v, "variant", str(v)))
def test_the_odd_element_of_a_pair_is_added_first(of, form):
    """1 + 2^24 - 2^24: float32 drops the 1 if 2^24 is added to it. 32 elements have one lane."""
    number = LIBRARIES.index(of)
    for at, want in (((0, 1, 32), 0), ((1, 0, 32), 0), ((32, 0, 1), 1), ((0, 33, 1), 1)):
        up = torch.zeros(1, 1, 34)
        up[0, 0, list(at)] = torch.tensor([1.0, 2.0**24, -(2.0**24)])
        layer = Layer(up.bfloat16(), torch.ones(1, 1, 1, dtype=BFLOAT16))
        mid, _ = outputs(layer, torch.ones(1, 34), form, number)
        # Lane 0 takes elements 1, 0, 33, 32, in this order.
        order = [1, 0, 33, 32]
        total = torch.zeros(())
        for element in order:
            total = total + up[0, 0, element]
        assert mid.item() == total.item() == want, at


@pytest.mark.parametrize("hidden", [1, 2, 31, 32, 33, 63, 65, 95, 200])
def test_tokens_have_the_same_bits_one_by_one_and_together_in_every_form(hidden):
    """Rows that are no multiple of a tile, and tokens up to more than share weights at a time."""
    inner, most = 2 * hidden + 3, 37
    draw = lambda *shape: normals(*shape).bfloat16()  # noqa: E731
    layer = Layer(draw(1, inner, hidden), draw(1, hidden, inner))
    x = normals(most, hidden).bfloat16()
    single = [outputs(layer, x[t:][:1], False) for t in range(most)]
    want = [torch.cat(parts) for parts in zip(*single, strict=True)]
    exact = x.double() @ layer.up[0].double().T
    assert torch.allclose(want[0].double(), exact, rtol=2**-7, atol=1e-5 * hidden)
    for of, form in FORMS:
        for tokens in (*range(1, 10), 31, 32, 33, 36, most):
            got = outputs(layer, x[:tokens], form, LIBRARIES.index(of))
            for each, all_tokens in zip(got, want, strict=True):
                assert torch.equal(each, all_tokens[:tokens]), (of.variant, form, tokens)


def linear_layer(weight: Tensor, x: Tensor, form: bool, of: int) -> Tensor:
    """The outputs of a linear layer for some input rows, on one thread."""
    out = torch.zeros(len(x), len(weight), dtype=BFLOAT16)
    matrix = library().structure("Matrix")(base=weight.data_ptr())
    call = library().structure("LinearCall")(
        matrix=ctypes.addressof(matrix), outputs=len(weight), inputs=x.shape[1], rows=len(x),
        x=x.data_ptr(), out=out.data_ptr(),
    )  # fmt: skip
    with pair_form(LIBRARIES[of], form):
        entries("linear", BFLOAT16)[of](ctypes.addressof(call), False)
    return out


@pytest.mark.parametrize("inputs", [2, 31, 32, 33, 95, 200])
def test_rows_of_a_linear_layer_have_the_same_bits_in_every_form(inputs):
    """Two large terms cancel, so what is left shows the order of additions in its first bits."""
    weight, x = normals(70, inputs).bfloat16(), normals(37, inputs).bfloat16()
    x[:, 0] = x[:, -1] = 1000
    weight[:, 0] += 1000
    weight[:, -1] = -weight[:, 0]
    want = torch.cat([linear_layer(weight, x[t:][:1], False, 0) for t in range(len(x))])
    exact = x.double() @ weight.double().T
    assert (want.double() - exact).abs().max() < 1 + 2**-8 * exact.abs().max()
    for of, form in FORMS:
        for rows in (1, 2, 3, 4, 5, 8, 31, 32, 33, 37):
            got = linear_layer(weight, x[:rows], form, LIBRARIES.index(of))
            assert torch.equal(got, want[:rows]), (of.variant, form, rows)
