"""The gated activation of dense MLPs in C++."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from greenroom.runtime.kernels.activation import SILU
from greenroom.runtime.kernels.launch.sequence import address_of
from greenroom.runtime.kernels.native.library import library
from tests.runtime.kernels.native.variants import DTYPES, entries, same_bits

NEAR = {torch.bfloat16: 2**-7, torch.float16: 2**-9, torch.float32: 1e-6}


def activated(dtype: torch.dtype, gate: Tensor, up: Tensor) -> list[Tensor]:
    """The activation by every library, each in the memory of the gate."""
    outputs = []
    for entry in entries("activate", dtype):
        out = gate.clone()
        call = library().structure("ActivateCall")(
            gate=out.data_ptr(), up=up.data_ptr(), out=out.data_ptr(),
            rows=len(gate), columns=gate.shape[1],
        )  # fmt: skip
        call.activation.code, call.activation.limit = SILU, float("inf")
        entry(address_of(call))
        outputs.append(out)
    return outputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 100), (3, 700), (16, 256), (5, 31)])
def test_gate_and_up_have_the_same_bits_in_every_library(dtype, shape):
    random = torch.Generator().manual_seed(shape[1])
    gate, up = ((torch.randn(shape, generator=random) * 4).to(dtype) for _ in range(2))
    outputs = activated(dtype, gate, up)
    assert same_bits(outputs)
    expected = silu(gate.double()) * up.double()
    torch.testing.assert_close(outputs[0].double(), expected, rtol=2 * NEAR[dtype], atol=1e-6)
    alone = [activated(dtype, *rows) for rows in zip(gate.split(1), up.split(1), strict=True)]
    assert torch.equal(torch.cat([each[0] for each in alone]), outputs[0])
