"""The look-up of one token's experts, compiled without a GPU."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

import triton

from greenroom.runtime.kernels.triton.look_up import look_up
from tests.offline_gpu.compiler import compile_launch, specialize
from tests.offline_gpu.launches import Launch

TOP_K, EXPERTS = 8, 128


@pytest.mark.offline_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", [80, 89, 90, 100, 120])
def test_the_look_up_compiles_once_for_all_layers_and_writes_whole_words(architecture):
    assert not triton.knobs.runtime.interpret, "run it by make check-gpu-offline"
    for again in (False, True):
        keys = set()
        for layer in (0, 1, 16):
            sizes = [(1, TOP_K), (6144,), (4 * TOP_K,), (TOP_K,), (2 * TOP_K,), (TOP_K,), (1,)]
            sizes += [(4 * TOP_K,)]
            tensors = (torch.empty(s, dtype=torch.int64, device="meta") for s in sizes)
            arguments = *tensors, layer * EXPERTS, EXPERTS, TOP_K
            options = {"AGAIN": again, "K": TOP_K, "num_warps": 1}
            launch = Launch("look-up", "plain", look_up, arguments, options)
            keys.add(specialize(launch, architecture).key)
        assert len(keys) == 1
        ptx = compile_launch(launch, architecture).ptx
        # A word is one store of 64 bits, so that the host never sees half of it.
        assert re.search(r"st\.global(\.\w+)*\.b64", ptx)
        assert not re.search(r"st\.global(\.\w+)*\.b(8|16|32)", ptx)
