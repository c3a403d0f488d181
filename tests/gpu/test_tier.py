"""Copies, marks and memory on a real device."""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from greenroom.core.layout import Copy, TensorSpec
from greenroom.errors import DeviceError
from greenroom.runtime.cuda.engine import Cuda, device_errors
from greenroom.runtime.cuda.ids import to_host
from greenroom.runtime.cuda.slots import DeviceSlots

MIB = 1 << 20


@pytest.fixture
def engine() -> Cuda:
    return Cuda()


def run(nbytes: int) -> tuple[Copy, ...]:
    return (Copy(0, 0, (1, nbytes), (nbytes, 1), (nbytes, 1), "uint8", "uint8"),)


def test_host_memory_is_registered_and_can_be_given_up(engine):
    memory = mmap.mmap(-1, 8 * MIB)
    whole = np.frombuffer(memory, np.uint8)
    whole[:] = np.arange(whole.size, dtype=np.uint8)
    assert engine.register(whole.ctypes.data, whole.size) is None
    slots = DeviceSlots(engine, 2, 4 * MIB, 2)
    slots.write(1, run(4 * MIB), whole[4 * MIB :], 0)
    assert np.array_equal(slots.bytes(1).cpu().numpy(), whole[4 * MIB :])
    engine.unregister(whole.ctypes.data)


@pytest.mark.parametrize("captured", [False, True])
def test_a_kernel_copies_from_registered_memory(engine, captured):
    """Its list and the sources are read when it runs, also as a graph."""
    module = pytest.importorskip("greenroom.runtime.kernels.triton.copies", exc_type=ImportError)
    if not engine.kernels_read_host:
        pytest.skip("this GPU has other addresses for registered memory")
    memory = mmap.mmap(-1, 8 * MIB)
    whole = np.frombuffer(memory, np.int64)
    assert engine.register(whole.ctypes.data, whole.nbytes) is None
    slots, copies = DeviceSlots(engine, 2, 4 * MIB, 2), module.ListedCopies(engine, 3)
    sizes = (7, 4 * MIB // 8 - 20, 1)
    if captured:
        copies.capture()
    for first in (1, 1000):  # the second time at odd places, with other bytes
        whole[:] = first + np.arange(whole.size)
        expected = np.zeros(4 * MIB // 8, np.int64)
        slots.bytes(1).zero_()
        rows, at = [], 0
        for size in sizes:
            source = whole[first + at :][:size]
            rows += [source.ctypes.data, slots.address(1) + 8 * at, size]
            expected[at : at + size] = source
            at += size + 2
        copies.numbers[:] = [len(sizes), *rows]
        copies.start()
        torch.cuda.synchronize()
        assert np.array_equal(slots.bytes(1).cpu().numpy().view(np.int64), expected)
    engine.unregister(whole.ctypes.data)


def test_other_threads_have_random_numbers_during_a_capture(engine):
    """They are those that the seed gives without a capture."""
    number = torch.zeros(1, device="cuda")
    numbers = list[torch.Tensor]()

    def draw() -> None:
        numbers.append(torch.rand(9, device="cuda"))

    def work() -> None:
        number.add_(1)
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()

    torch.cuda.manual_seed(7)
    work()  # which also compiles and loads what a capture may not
    torch.cuda.manual_seed(7)
    replay = engine.capture(work)
    draw()
    torch.cuda.manual_seed(7)
    draw()
    draw()
    replay()
    assert replay is not work
    assert len(numbers) == 5
    without, within, behind, *again = numbers
    assert torch.equal(without, within)
    assert torch.equal(within, again[0])
    assert torch.equal(behind, again[1])


FAILING = """
import torch
from greenroom.runtime.cuda.engine import Cuda

engine = Cuda()
number = torch.ones(1, device="cuda")
assert engine.capture(number.item) == number.item  # it waits, so CUDA ends the capture
print(torch.rand(1, device="cuda").item() < 1)
"""


def test_random_numbers_may_be_drawn_after_a_capture_that_failed():
    """In a process of its own, since torch does not free all memory behind such a capture."""
    done = subprocess.run(
        [sys.executable, "-c", FAILING], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True"


def test_what_cannot_be_registered_is_said_and_breaks_nothing(engine):
    memory = mmap.mmap(-1, MIB)
    whole = np.frombuffer(memory, np.uint8)
    assert engine.register(whole.ctypes.data, whole.size) is None
    assert "error" in str(engine.register(whole.ctypes.data, whole.size))  # twice is refused
    assert float(torch.ones(3, device="cuda").sum()) == 3  # and the next launch is none the wiser
    engine.unregister(whole.ctypes.data)
    slots = DeviceSlots(engine, 1, MIB, 1)  # pageable memory does too
    slots.write(0, run(MIB), np.full(MIB, 7, np.uint8), 0)
    assert slots.bytes(0).min() == slots.bytes(0).max() == 7


def test_a_slot_is_overwritten_only_when_its_group_has_been_computed(engine):
    slots, size = DeviceSlots(engine, 1, 4 * MIB, 1), 4 * MIB
    slots.write(0, run(size), np.full(size, 1, np.uint8), 0)
    slow = torch.randn(4096, 4096, device="cuda")
    for _ in range(3):
        for _ in range(40):  # tens of milliseconds before the group reads
            slow = slow @ slow / 4096
        read = slots.bytes(0).clone()
        slots.mark_computed([0])
        slots.write(0, run(size), np.full(size, 2, np.uint8), 0)
        assert int(read.max()) == 1
        slots.write(0, run(size), np.full(size, 1, np.uint8), 0)


def test_what_is_rearranged_on_the_device_is_what_was_meant(engine):
    source = torch.randn(33, 65).bfloat16()
    data = source.view(torch.uint8).numpy().reshape(-1)
    copy = Copy(0, 64, (65, 33), (2, 130), (66, 2), "bfloat16", "bfloat16")
    slots = DeviceSlots(engine, 1, 64 * 80, 1)
    slots.write(0, (copy,), data, 0)
    got = slots.tensor(0, TensorSpec("x", (65, 33), "bfloat16", 64))
    assert torch.equal(got.cpu(), source.T)


def test_segments_come_and_go(engine, monkeypatch):
    monkeypatch.setattr("greenroom.runtime.cuda.slots.SEGMENT_BYTES", 8 * MIB)
    slots = DeviceSlots(engine, 1, 2 * MIB, 100)
    slots.write(0, run(2 * MIB), np.full(2 * MIB, 9, np.uint8), 0)
    for capacity in (30, 3, 100, 1):
        slots.trim(capacity)
        assert slots.bytes(0).min() == 9
    torch.cuda.synchronize()


@pytest.mark.fills_memory
def test_a_device_without_room_says_who_has_it(engine):
    _, total = engine.memory()
    with pytest.raises(DeviceError, match=r"has no room for .* for slots: .* are free"):
        engine.empty(2 * total)
    slots = DeviceSlots(engine, 1, 4 * MIB, 1 << 40)
    with pytest.raises(DeviceError, match="has no room"):
        slots.trim(2 * total // (4 * MIB))
    assert slots.capacity == 1


def test_ids_come_to_the_host():
    for tokens in (1, 700, 3):
        index = torch.randint(0, 60, (tokens, 8), device="cuda")
        weights = torch.rand(tokens, 8, device="cuda").bfloat16()
        with torch.inference_mode():  # whose buffers serve the next pass, outside of it
            to_host(index, weights)
        chosen, found = to_host(index, weights)
        assert np.array_equal(chosen, index.cpu().numpy())
        assert np.array_equal(found, weights.float().cpu().numpy())


def test_an_error_of_cuda_is_one_line():
    with pytest.raises(DeviceError, match="the GPU") as caught, device_errors("a huge tensor"):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    assert "\n" not in str(caught.value)
