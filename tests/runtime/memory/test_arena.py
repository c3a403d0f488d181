"""Tensors side by side in reservations of large pages."""

from __future__ import annotations

import gc
import time
import weakref
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.errors import DeviceError
from greenroom.runtime.memory import arena
from greenroom.runtime.memory.arena import ALIGNMENT, SPAN, TensorArena
from greenroom.runtime.memory.system import rss_bytes
from tests.runtime.rig import in_time

SHAPES = st.lists(st.integers(0, 40), min_size=1, max_size=3)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64])


@settings(deadline=None)
@given(st.lists(st.tuples(SHAPES, DTYPES), max_size=12))
def test_every_tensor_has_its_own_aligned_memory(shapes):
    tensor_arena, with_pages = [], TensorArena()
    for number, (shape, dtype) in enumerate(shapes):
        tensor = with_pages.empty(*shape, dtype=dtype)
        assert (list(tensor.shape), tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % ALIGNMENT == 0
        tensor_arena.append(tensor.fill_(number))
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensor_arena))


class SlowArena(TensorArena):
    """An arena in which another thread runs each time that its position is read."""

    @property
    def _used(self) -> int:
        used = self._position
        time.sleep(1e-4)
        return used

    @_used.setter
    def _used(self, value: int) -> None:
        self._position = value


def test_tensors_of_several_threads_do_not_overlap():
    """Without the arena's lock, two weights of a model got the same memory once in a while."""
    slow_arena, filled = SlowArena(), []

    def allocate(thread: int) -> None:
        for value in range(thread * 50, thread * 50 + 50):
            filled.append((slow_arena.empty(32, dtype=torch.int64).fill_(value), value))

    in_time(*(partial(allocate, thread) for thread in range(4)))
    assert len(filled) == 200
    assert all(bool((tensor == value).all()) for tensor, value in filled)


def test_a_span_is_shared_and_a_larger_tensor_has_its_own(monkeypatch):
    calls = []
    reserve_memory = arena.reserve_memory

    def record(nbytes, **options):
        calls.append((nbytes, options))
        return reserve_memory(nbytes, **options)

    monkeypatch.setattr(arena, "reserve_memory", record)
    tensor_arena = TensorArena()
    first, second = (tensor_arena.empty(1000, dtype=torch.uint8) for _ in range(2))
    assert second.data_ptr() - first.data_ptr() == 1024
    tensor_arena.empty(SPAN + 1, dtype=torch.uint8)
    tensor_arena.empty(1, dtype=torch.uint8)
    assert [nbytes for nbytes, _ in calls] == [SPAN, SPAN + 1, SPAN]
    assert all(options == {"large_pages": True} for _, options in calls)


def test_memory_is_taken_when_it_is_written_and_goes_back_with_the_last_tensor():
    before, tensor_arena = rss_bytes(), TensorArena()
    tensor = tensor_arena.empty(64 << 20, dtype=torch.uint8)
    assert rss_bytes() - before < 16 << 20
    tensor.fill_(1)
    assert rss_bytes() - before > 60 << 20
    alive = weakref.ref(tensor)
    del tensor_arena, tensor
    gc.collect()
    assert alive() is None
    assert rss_bytes() - before < 16 << 20


def test_a_lack_of_address_space_is_an_error():
    with pytest.raises(DeviceError, match="no address space for"):
        TensorArena().empty(1 << 60, dtype=torch.uint8)
