from __future__ import annotations

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.layout import Copy, SlotLayout, TensorSpec
from greenroom.errors import DeviceError
from greenroom.runtime.fakes import FakeSlots
from greenroom.runtime.slots.host import HostSlots


def test_tensors_are_views_of_their_slot():
    layout = SlotLayout.pack([("a", (3, 5), "bfloat16"), ("b", (2, 2), "float32")])
    slots = HostSlots(3, layout.nbytes)
    slots.tensor(1, layout["b"])[:] = 7
    assert slots.tensor(1, layout["b"]).tolist() == [[7, 7], [7, 7]]
    assert slots.tensor(2, layout["b"]).sum() == 0
    assert slots.tensor(1, layout["a"]).dtype == torch.bfloat16
    assert slots.tensor(1, layout["b"]).data_ptr() == slots.base + layout.nbytes + 64


@given(start=st.integers(0, 39), length=st.integers(1, 40))
def test_a_chunk_writes_its_part_of_each_tensor_and_nothing_else(start, length):
    """Two runs of ten floats, one behind the other on disk, swapped in the slot."""
    data = np.arange(80, dtype=np.uint8)
    run = ((1, 10), (40, 4), (40, 4), "float32", "float32")
    copies = (Copy(0, 64, *run), Copy(40, 0, *run))
    slots = HostSlots(1, 128)
    stop = min(start + length, 80)
    slots.write(0, copies, data[start:stop], start)
    expected = np.zeros(128, np.uint8)
    for i in range(start, stop):
        expected[64 + i if i < 40 else i - 40] = i
    assert (slots.bytes(0)[:104] == expected[:104]).all()


@pytest.mark.parametrize("source_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("target_dtype", ["float32", "bfloat16", "float16"])
@given(shape=st.tuples(st.integers(1, 7), st.integers(1, 7)), offset=st.sampled_from([0, 8, 40]))
@settings(max_examples=20)
def test_a_strided_copy_transposes_and_casts(source_dtype, target_dtype, shape, offset):
    rows, columns = shape
    source = torch.randn(rows, columns).to(getattr(torch, source_dtype))
    width, wide = source.element_size(), getattr(torch, target_dtype).itemsize
    raw = source.view(torch.uint8).numpy().reshape(-1)
    data = np.concatenate([np.zeros(offset, np.uint8), raw])
    copy = Copy(
        offset, 64, (columns, rows), (width, columns * width), (rows * wide, wide),
        source_dtype, target_dtype,
    )  # fmt: skip
    slots = HostSlots(1, 512)
    slots.write(0, (copy,), data, 0)
    got = slots.tensor(0, TensorSpec("x", (columns, rows), target_dtype, 64))
    assert torch.equal(got, source.T.to(got.dtype))


def test_trimming_gives_memory_back_and_growing_takes_it_again():
    slots = HostSlots(64, 1 << 20)
    process = psutil.Process()
    for slot in range(64):
        slots.bytes(slot)[:] = 1
    full = process.memory_info().rss
    slots.trim(4)
    assert full - process.memory_info().rss > 40 << 20
    assert slots.bytes(3).min() == 1
    slots.trim(0)
    assert slots.capacity == 0
    slots.trim(64)
    slots.bytes(63)[:] = 2
    with pytest.raises(DeviceError, match="between 0 and 64"):
        slots.trim(65)


def test_an_impossible_reservation_is_one_clear_line():
    with pytest.raises(DeviceError, match="no address space for"):
        HostSlots(1 << 40, 1 << 30)


def test_the_fake_device_poisons_a_slot_before_a_piece_comes():
    spec = TensorSpec("x", (4,), "bfloat16", 0)
    slots = FakeSlots(2, 64)
    slots.tensor(0, spec)[:] = 1
    slots.clear(0)
    assert slots.tensor(0, spec).isnan().all()
