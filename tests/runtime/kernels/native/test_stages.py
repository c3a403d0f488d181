"""Kernels that run other kernels, or set their calls."""

from __future__ import annotations

import ctypes
import threading
import time
from array import array
from pathlib import Path

import pytest

from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.native.library import library

KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


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


def enter(call: ctypes.Structure) -> threading.Thread:
    """Let another thread enter a region."""
    address = ctypes.addressof(call)
    thread = threading.Thread(target=lambda: kernel_entry("run_stages")(address, wide=False))
    thread.start()
    return thread


def test_nobody_waits_for_a_thread_that_is_late_and_all_for_one_that_has_a_unit():
    inside, release, lock, later = threading.Event(), threading.Event(), threading.Lock(), []

    @KERNEL
    def first(_call):
        if lock.acquire(blocking=False):  # the only unit
            inside.set()
            release.wait()

    second = KERNEL(later.append)
    kernels = [ctypes.cast(each, ctypes.c_void_p).value for each in (first, second)]
    stages = (library().structure("Stage") * 2)(*((each, 7) for each in kernels))
    call = library().structure("StagesCall")(count=2, stages=ctypes.addressof(stages))
    threads = [enter(call)]
    inside.wait()
    threads.append(enter(call))
    wait_for_sleep(threads[1])  # it has nothing to do, and waits for the unit
    assert later == []
    release.set()
    for thread in threads:
        thread.join()
    assert 7 in later
    count = len(later)
    enter(call).join()  # too late for any stage
    assert len(later) == count


def wait_for_sleep(thread: threading.Thread) -> None:
    """Wait until a thread sleeps, so that its core is free."""
    place = Path(f"/proc/self/task/{thread.native_id}/stat")
    while place.read_text().rsplit(")", 1)[1].split()[0] != "S":
        time.sleep(0.001)


def test_a_thread_that_awaits_a_counter_sleeps_until_it_is_high_enough():
    call = library().structure("AwaitTest")(counter=1, amount=3)
    address = ctypes.addressof(call)
    thread = threading.Thread(target=lambda: kernel_entry("test_await")(address, wide=False))
    thread.start()
    for counter in (1, 2):
        wait_for_sleep(thread)
        assert thread.is_alive()
        assert call.counter == counter
        kernel_entry("test_count")(address, wide=False)
    thread.join()
    assert call.counter == 3
