"""Kernels for split experts; tests/runtime/kernels/triton has those of the GPU."""

from __future__ import annotations

import threading

import pytest
import torch

pytest.importorskip("triton")

from greenroom.runtime.kernels.eager import EagerKernel
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.kernels.segments import SegmentedKernel
from tests.runtime.kernels.toys import EXPERTS, compute, experts, inputs, layer_of
from tests.runtime.kernels.triton.test_kernel import in_segments


def test_a_thread_that_begins_a_step_leaves_that_of_another_thread_alone():
    """Steps take turns in the driver, but threads begin them outside of it."""
    module = experts("qwen3_moe", torch.bfloat16, hidden=64, inner=192)
    x, index, weights = inputs(torch.bfloat16, 2, hidden=64)
    whole, places = layer_of(module)
    want = compute(EagerKernel(), whole, places, x, index, weights)
    layer, _ = in_segments(module, 1)
    kernel, routing = SegmentedKernel(EagerKernel(), 2), Routing.of(index.numpy(), EXPERTS)
    step, chosen = kernel.begin(layer, x, routing, weights), routing.experts.tolist()
    kernel.compute_group(step, chosen, [2 * expert for expert in chosen], 0)
    another = threading.Thread(target=kernel.begin, args=(layer, x, routing, weights))
    another.start()
    another.join(30)
    kernel.compute_group(step, chosen, [2 * expert + 1 for expert in chosen], 1)
    assert torch.equal(kernel.combine(step), want)
