"""Kernels that run other kernels, or set their calls."""

from __future__ import annotations

import ctypes
from array import array

import pytest

from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.native.library import library


class Copies:
    """A call that copies ranges of arrays; each is (target, source, length)."""

    def __init__(self, *ranges: tuple[array[int], array[int], int]) -> None:
        self._arrays, run = ranges, library().structure("Run")
        self._runs = (run * len(ranges))(
            *(run(to.buffer_info()[0], of.buffer_info()[0], n) for to, of, n in ranges)
        )
        self._call = library().structure("CopyCall")(
            count=len(ranges), runs=ctypes.addressof(self._runs)
        )
        self.address = ctypes.addressof(self._call)


def run_stages(*stages: tuple[int, int]) -> None:
    """Run (address of a kernel, of its call) on all threads, with barriers between."""
    stage = library().structure("Stage")
    each = (stage * len(stages))(*(stage(*addresses) for addresses in stages))
    call = library().structure("StagesCall")(count=len(stages), stages=ctypes.addressof(each))
    kernel_entry("run_stages")(ctypes.addressof(call))


@pytest.fixture
def copy() -> int:
    return kernel_entry("copy_calls").address


def test_a_stage_reads_what_the_one_before_it_has_written(copy):
    source, middle, end = array("q", range(1, 9)), array("q", [0] * 8), array("q", [0] * 8)
    first = Copies((middle, source, 8))
    second = Copies((end, middle, 3), (array("q"), middle, 0))
    run_stages((copy, first.address), (copy, second.address))
    assert middle == source
    assert end.tolist() == [1, 2, 3, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("flag", [0, 5])
def test_stages_end_at_a_number_that_is_zero(copy, flag):
    one, flags = array("q", [7]), array("q", [-1])
    set_flag, after = Copies((flags, array("q", [flag]), 1)), Copies((one, array("q", [9]), 1))
    stages = [(copy, set_flag.address), (0, flags.buffer_info()[0]), (copy, after.address)]
    run_stages(*stages)
    assert one.tolist() == [9 if flag else 7]
