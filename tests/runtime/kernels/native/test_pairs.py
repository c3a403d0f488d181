"""Products of bfloat16 by pairs: sums by hand, and the same bits by instruction and by FMAs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

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
