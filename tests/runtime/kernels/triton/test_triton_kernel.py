"""The default kernel on a GPU: what it keeps of a layer."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.slots import DeviceSlots
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.kernels.triton import TritonKernel
from greenroom.runtime.kernels.triton.plan import plan_of
from tests.runtime.kernels.toys import EXPERTS, experts, inputs, layer_of


def test_slots_of_a_device_that_is_added_again_are_found():
    """Slot 0, from which other slots are counted, has other memory then."""
    layer, _ = layer_of(
        experts("qwen3_moe", torch.bfloat16, 32, 32),
        slots=lambda layout, count: DeviceSlots(
            Engine(), count, -(-layout.nbytes // 64) * 64, count
        ),
    )
    x, index, weights = inputs(torch.bfloat16, 1, hidden=32)
    routing, kernel = Routing.of(index.numpy(), EXPERTS), TritonKernel()
    first = kernel.begin(layer, x, routing, weights).plan
    assert kernel.begin(layer, x, routing, weights).plan is first
    layer.slots.trim(0)
    layer.slots.trim(EXPERTS)
    assert plan_of(layer) is not first  # also of segments and copies, which no step begins with
    again = kernel.begin(layer, x, routing, weights).plan
    for matrix in (again.up, again.down):
        assert matrix.codes.data_ptr() == layer.slots.address(0)
        assert matrix.codes.untyped_storage().nbytes() > 0
    assert again.offset(layer, 1) * 64 == layer.slots.stride
