from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks import ram_store
from benchmarks.ram_store import RamStore
from greenroom.core.pieces import Pieces
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.errors import BudgetError, StoreError
from greenroom.policies import policy
from greenroom.runtime.slots.host import HostSlots
from greenroom.runtime.store.disk import BLOCK, DiskStore, Staging
from greenroom.runtime.store.throttle import Throttle


def read_all(store, expert: int) -> bytes:
    staging = Staging()
    return b"".join(store.read(c, staging).tobytes() for c in store.chunks(expert))


@pytest.mark.parametrize("chunk_bytes", [BLOCK, 10_000, 1 << 20])
def test_it_gives_what_the_disk_gives(disk, chunk_bytes):
    catalog = disk()
    disk_store, from_ram = (
        kind(catalog, chunk_bytes=chunk_bytes) for kind in (DiskStore, RamStore)
    )
    for expert in range(catalog.experts):
        assert from_ram.chunks(expert) == disk_store.chunks(expert)
        assert read_all(from_ram, expert) == read_all(disk_store, expert)
    disk_store.close()


def test_the_file_is_read_once(disk):
    catalog = disk()
    store = RamStore(catalog)
    expected = [read_all(store, expert) for expert in range(catalog.experts)]
    Path(catalog.files[0]).unlink()
    assert [read_all(store, expert) for expert in range(catalog.experts)] == expected


def test_a_read_waits_for_the_line(disk):
    carried = []

    class RecordingThrottle(Throttle):
        def carry(self, nbytes: int, early: float = 0.0) -> None:
            carried.append((nbytes, early))

    catalog = disk()
    store = RamStore(catalog, RecordingThrottle(1e9), chunk_bytes=BLOCK)
    read_all(store, 3)
    assert [nbytes for nbytes, _ in carried] == [chunk.length for chunk in store.chunks(3)]
    assert sum(nbytes for nbytes, _ in carried) == 24_000
    assert all(early > 0 for _, early in carried)


def test_several_caches_one_after_another(disk):
    """Closing a driver closes its store; the bytes are there for the next one."""
    from greenroom.runtime.driver.driver import Driver

    catalog = disk()
    store = RamStore(catalog, chunk_bytes=BLOCK)
    chunks = [len(store.chunks(expert)) for expert in range(catalog.experts)]
    pieces = Pieces.unsplit(catalog.offsets, [x.nbytes for x in catalog.layouts], chunks)
    for _ in range(2):
        slots = HostSlots(2, catalog.slot_bytes)
        driver = Driver(Scheduler(pieces, 2, policy("lru"), lanes=2), store, slots)
        calls = []

        def compute(experts, at, slots=slots, calls=calls):
            layout = catalog.layouts[1]
            for expert, slot in zip(experts.tolist(), at.tolist(), strict=True):
                assert (slots.tensor(slot, layout["up"]) == 4 + expert).all()
                calls.append(expert)

        driver.step(1, np.array([0, 1, 3]), compute)
        assert sorted(calls) == [0, 1, 3]
        driver.close()


def test_a_file_cut_short_is_an_error_of_the_store(disk):
    catalog = disk()
    os.truncate(catalog.files[0], 30_000)
    with pytest.raises(StoreError, match="is truncated"):
        RamStore(catalog)


def test_experts_that_do_not_fit_are_refused_before_they_are_read(disk, monkeypatch):
    monkeypatch.setattr(ram_store, "available_bytes", lambda: 100_000)
    with pytest.raises(BudgetError, match=r"the experts need 188 KiB of memory: 97.7 KiB are free"):
        RamStore(disk())
