"""The fused kernel on encoded experts has the bits of the plain one on their decoder's weights."""

from __future__ import annotations

import pytest
import torch

from greenroom.runtime.kernels.eager import Eager
from greenroom.runtime.kernels.fused import Fused
from tests.runtime.kernels.codes import STYLES, Coded, Style
from tests.runtime.kernels.toys import DTYPES, compute, experts, inputs

TOKENS = (1, 3, 33)


def check(coded: Coded, dtype: torch.dtype, hidden: int, tokens: int) -> None:
    fused = Fused(float32=True)
    assert not coded.layer.unfused
    case = inputs(dtype, tokens, hidden=hidden, seed=tokens)
    want = compute(fused, coded.plain, coded.places, *case)
    got = compute(fused, coded.layer, coded.places, *case)
    assert want.isfinite().all()
    assert want.abs().max() > 0
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("style", STYLES, ids=str)
def test_bits_of_the_expanded_weights(style: Style, dtype: torch.dtype) -> None:
    hidden, inner = (256, 512) if style.name.endswith("_k") else (192, 128)
    coded = Coded(experts("qwen3_moe", dtype, hidden, inner), style, style)
    for tokens in TOKENS:
        check(coded, dtype, hidden, tokens)
