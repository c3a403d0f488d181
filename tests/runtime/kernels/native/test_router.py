"""The choice of experts in C++."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from greenroom.runtime.kernels.launch.sequence import address_of
from greenroom.runtime.kernels.native.library import library
from tests.runtime.kernels.native.variants import DTYPES, entries, same_bits

TOP_K, SCALE, LEAST_SUM = 4, 2.5, 1e-20


def choices(logits: Tensor, bias: Tensor | None, summed: bool) -> list[tuple[Tensor, Tensor]]:
    """The experts and gate weights by every library."""
    found = []
    for entry in entries("select", logits.dtype):
        ids, weights = torch.zeros(TOP_K, dtype=torch.int64), torch.zeros(TOP_K)
        call = library().structure("Choice")(
            logits=logits.data_ptr(), experts=len(logits), top_k=TOP_K, summed=summed, wide=True,
            ids=ids.data_ptr(), weights=weights.data_ptr(), least_sum=LEAST_SUM, scale=SCALE,
            bias=None if bias is None else bias.data_ptr(),
        )  # fmt: skip
        entry(address_of(call))
        found.append((ids, weights) if call.chosen == TOP_K else (ids - 1, weights))
    return found


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", [5, 16, 60, 128])
def test_experts_and_weights_have_the_same_bits_in_every_library(experts, dtype, biased, summed):
    random = torch.Generator().manual_seed(experts)
    for _ in range(20):
        logits = (torch.randn(experts, generator=random) * 3).to(dtype)
        if len(logits.unique()) < experts:
            continue  # equal scores are left to torch
        bias = torch.randn(experts, generator=random) if biased else None
        found = choices(logits, bias, summed)
        assert same_bits([ids for ids, _ in found])
        assert same_bits([weights for _, weights in found])
        wide = logits.double()
        scores = wide.sigmoid() if biased else wide.softmax(0)
        keys = scores if bias is None else scores + bias.double()
        ids = keys.topk(TOP_K).indices
        expected = scores[ids] / (scores[ids].sum() if summed else 1) * SCALE
        assert torch.equal(found[0][0], ids)
        torch.testing.assert_close(found[0][1].double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_choice_by_what_is_no_number_is_left_to_torch(value: float) -> None:
    logits, bias = torch.arange(16.0), torch.zeros(16)
    bias[3] = value
    assert all(torch.equal(ids, torch.full((TOP_K,), -1)) for ids, _ in choices(logits, bias, True))
    bias[3], logits[3] = 0, float("nan")
    for each in (bias, None):
        assert all((ids == -1).all() for ids, _ in choices(logits, each, True))
