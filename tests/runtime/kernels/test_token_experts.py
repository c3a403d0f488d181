"""One token's experts by calls that are built once: the bits of a step like any other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from greenroom.runtime.kernels.cpu import CpuKernel
from greenroom.runtime.kernels.eager import EagerKernel
from greenroom.runtime.kernels.token_experts import ThreadTokenExperts, TokenExperts
from tests.runtime.kernels.toys import CLASSES, EXPERTS, HIDDEN, compute, experts, inputs, layer_of

TOP_K = 3
GROUPS = ([[0, 1, 2]], [[1], [0, 2]], [[2], [1], [0]])


def result_of(token, places, groups, x, index, weights, residual):
    assert token.begin(index.numpy(), x, weights, residual)
    for group in groups:
        some = token.experts[group]
        token.compute_group(some, np.array([places[expert] for expert in some.tolist()]))
    return token.result


@pytest.mark.parametrize("weights_dtype", [None, torch.float32], ids=["same", "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", CLASSES)
def test_tokens_one_after_another_have_the_bits_of_a_step(family, dtype, weights_dtype):
    layer, places = layer_of(experts(family, dtype))
    kernel = CpuKernel()
    token = TokenExperts.of(kernel, layer, TOP_K, weights_dtype or dtype)
    if token is None:
        pytest.skip("the sum is not computed in a group's region")
    for seed, groups in enumerate(GROUPS):
        case = inputs(dtype, 1, top_k=TOP_K, weights_dtype=weights_dtype, seed=seed)
        wanted = compute(kernel, layer, places, *case)
        assert torch.equal(result_of(token, places, groups, *case, None), wanted)
        residual = torch.full((1, 1, HIDDEN), 0.5, dtype=dtype)
        result = result_of(token, places, groups, *case, residual)
        assert torch.equal(result, residual + wanted)


def test_results_of_earlier_tokens_stay():
    layer, places = layer_of(experts("qwen3_moe", torch.bfloat16))
    token = TokenExperts(CpuKernel(), layer, TOP_K, torch.bfloat16)
    cases = [inputs(torch.bfloat16, 1, top_k=TOP_K, seed=seed) for seed in range(2)]
    first = result_of(token, places, GROUPS[0], *cases[0], None)
    before = first.clone()
    assert not torch.equal(result_of(token, places, GROUPS[0], *cases[1], None), before)
    assert torch.equal(first, before)


@pytest.mark.parametrize("ids", [[0, 1, 1], [0, 1, EXPERTS], [0, 1]], ids=str)
def test_other_choices_are_refused(ids):
    layer, _ = layer_of(experts("qwen3_moe", torch.bfloat16))
    token = TokenExperts(CpuKernel(), layer, TOP_K, torch.bfloat16)
    x, _, weights = inputs(torch.bfloat16, 1, top_k=TOP_K)
    assert not token.begin(np.array([ids]), x, weights, None)


def test_only_the_plain_kernel_has_such_calls():
    layer, _ = layer_of(experts("qwen3_moe", torch.bfloat16))
    assert ThreadTokenExperts(EagerKernel(), layer).of(TOP_K, torch.bfloat16) is None
    each = ThreadTokenExperts(CpuKernel(), layer)
    assert each.of(TOP_K, torch.bfloat16) is each.of(TOP_K, torch.bfloat16)
    assert each.of(EXPERTS + 1, torch.bfloat16) is None
