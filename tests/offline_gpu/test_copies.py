"""The kernel that copies experts from host memory, compiled without a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton

from greenroom.runtime.kernels.triton.copies import BLOCK, launch_of
from tests.offline_gpu.compiler import LANES, compile_launch, specialize
from tests.offline_gpu.launches import Launch
from tests.offline_gpu.listing import opcode, read_ptx


@pytest.mark.offline_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", [80, 89, 90, 100, 120])
def test_all_loads_of_a_block_are_on_their_way_before_a_store(architecture):
    assert not triton.knobs.runtime.interpret, "run it by make check-gpu-offline"
    keys = set()
    for copies in (1, 8, 72):
        started = launch_of(torch.empty(1 + 3 * copies, dtype=torch.int64, device="meta"))
        options = dict(started.constants)
        launch = Launch("copies", "plain", started.program, started.arguments, options)
        keys.add(specialize(launch, architecture).key)
    assert len(keys) == 1  # compiled once for all lists
    loop = read_ptx(compile_launch(launch, architecture).ptx).main_loop
    accesses = [opcode(each) for each in loop if opcode(each).startswith(("ld.g", "st.g"))]
    each_lane = BLOCK // (LANES * options["num_warps"])
    assert [each.split(".")[0] for each in accesses] == ["ld"] * each_lane + ["st"] * each_lane
    assert {each.split(".")[-1] for each in accesses} == {"b64"}
