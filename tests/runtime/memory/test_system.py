"""Memory of this process is counted with that of its helper processes."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

from greenroom.core.layout import SlotLayout
from greenroom.runtime.kernels.dense.stored import StoredMatrix, attach_matrix, dense_bytes
from greenroom.runtime.memory.system import (
    gc_paused,
    peak_rss_bytes,
    release_memory,
    rss_bytes,
)

BLOCK_BYTES = 64 << 20
HOLD = f"held = bytearray(b'x') * {BLOCK_BYTES}; print(flush=True); input()"


@pytest.mark.parametrize("count", [rss_bytes, peak_rss_bytes])
def test_a_child_counts_while_it_lives(count: object) -> None:
    assert callable(count)
    before = count()
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        grown = count() - before
    finally:
        child.communicate(b"\n")
    assert BLOCK_BYTES <= grown < BLOCK_BYTES + (32 << 20)
    assert count() - before < BLOCK_BYTES // 2


def test_a_peak_stays() -> None:
    before = rss_bytes()
    block = bytearray(b"x") * BLOCK_BYTES
    del block
    assert peak_rss_bytes() > before + BLOCK_BYTES - (1 << 20)  # the kernel counts in batches


def test_dense_bytes_count_stored_matrices_and_shared_tensors_once() -> None:
    model = nn.ModuleList([nn.Linear(64, 32, bias=False) for _ in range(3)])
    model[1].weight = model[0].weight
    model.register_buffer("table", torch.zeros(10))
    matrix = StoredMatrix(SlotLayout.pack([("weight", (32, 64), "float16")]), torch.float16)
    attach_matrix(model[2], matrix)
    assert dense_bytes(model) == 64 * 32 * 4 + 40 + matrix.nbytes


class Cycle:
    """An object that only the garbage collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("program_freezes", [False, True])
def test_a_collection_while_loading_visits_new_objects_only(program_freezes: bool) -> None:
    gc.unfreeze()  # what the fixture of all tests has frozen
    gc.disable()
    try:
        old = weakref.ref(Cycle())
        if program_freezes:
            gc.freeze()
        with gc_paused():
            new = weakref.ref(Cycle())
            release_memory()
            assert new() is None
            assert old() is not None
        assert bool(gc.get_freeze_count()) == program_freezes
        gc.collect()
        assert (old() is None) != program_freezes
    finally:
        gc.enable()
        gc.unfreeze()
        gc.collect()
        gc.freeze()
