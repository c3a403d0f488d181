from __future__ import annotations

import threading
from queue import SimpleQueue

import numpy as np
import pytest

from greenroom.core.events import StartChunk
from greenroom.errors import StoreError
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.host import HostMemory
from greenroom.runtime.driver.copier import Copier
from greenroom.runtime.fakes import FakeSlots
from greenroom.runtime.store.disk import DiskStore
from tests.runtime.rig import in_time, threads


@pytest.fixture
def rig(disk):
    """(store, slots, catalog) of 8 experts, two chunks each, and 8 slots."""
    catalog = disk()
    store = DiskStore(catalog, chunk_bytes=12288)
    yield store, FakeSlots(8, catalog.slot_bytes), catalog
    store.close()


def between(rig, staging_slots: int) -> HostMemory:
    store, _, catalog = rig
    chunks = [store.chunks(expert) for expert in range(catalog.experts)]
    return HostMemory(Engine(), chunks, staging_slots, 0)


def arrivals() -> tuple[SimpleQueue, object]:
    arrived: SimpleQueue = SimpleQueue()
    return arrived, lambda *what: arrived.put(what)


def value(slots: FakeSlots, catalog, slot: int, name: str) -> np.ndarray:
    return slots.tensor(slot, catalog.layouts[0][name]).numpy()


def test_a_lane_carries_chunks_in_order_and_says_how_many_bytes(rig):
    store, slots, catalog = rig
    arrived, deliver = arrivals()
    copier = Copier(store, slots, (1,), deliver)
    orders = [StartChunk(0, 3, 5, chunk) for chunk in range(2)]
    for order in orders:
        copier.start(order)
    results = [arrived.get(timeout=10) for _ in orders]
    copier.close()
    assert [action for action, _, _ in results] == orders
    assert [error for _, _, error in results] == [None, None]
    assert [nbytes for _, nbytes, _ in results] == [c.length for c in store.chunks(3)]
    assert sum(nbytes for _, nbytes, _ in results) == 24_000
    assert (value(slots, catalog, 5, "up") == 3).all()
    assert (value(slots, catalog, 5, "down") == 3.5).all()


def test_two_links_pass_chunks_through_staging_slots_in_any_order(rig):
    """Two pieces are staged before either goes on; the second goes on first."""
    store, slots, catalog = rig
    arrived, deliver = arrivals()
    copier = Copier(store, slots, (2, 1), deliver, between(rig, 6))
    staged = [(0, 1, 4, 0), (1, 2, 1, 0), (0, 1, 3, 1), (1, 2, 0, 1)]
    for lane, piece, staging_slot, chunk in staged:
        copier.start(StartChunk(lane, piece, piece, chunk, link=0, staging_slot=staging_slot))
    for _ in staged:
        assert arrived.get(timeout=10)[2] is None
    assert (value(slots, catalog, 1, "up") == 0).all()  # nothing is in a slot yet
    for _, piece, staging_slot, chunk in reversed(staged):
        copier.start(StartChunk(0, piece, piece, chunk, link=1, staging_slot=staging_slot))
    for _ in staged:
        assert arrived.get(timeout=10)[1] > 0
    copier.close()
    for piece in (1, 2):
        assert (value(slots, catalog, piece, "up") == piece).all()
        assert (value(slots, catalog, piece, "down") == piece + 0.5).all()


@pytest.mark.parametrize("error", [ValueError("a bug"), SystemExit("leaving"), MemoryError()])
def test_whatever_a_store_raises_is_reported_and_the_lane_lives(rig, monkeypatch, error):
    store, slots, _ = rig
    arrived, deliver = arrivals()
    copier = Copier(store, slots, (1,), deliver)

    def breaks(*args):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(store, "read", breaks)
        copier.start(StartChunk(0, 3, 5, 0))
        _, nbytes, failure = arrived.get(timeout=10)
    assert nbytes == 0
    assert isinstance(failure, StoreError)
    assert failure.__cause__ is error
    copier.start(StartChunk(0, 3, 5, 0))
    assert arrived.get(timeout=10)[2] is None
    copier.close()


def test_memory_for_staging_that_cannot_be_had_shows_at_once(rig, monkeypatch):
    """The error is raised when the copier is made, not in its thread."""

    def none(*args):
        raise MemoryError

    monkeypatch.setattr("greenroom.runtime.driver.copier.Staging", none)
    before = threads()
    with pytest.raises(MemoryError):
        Copier(*rig[:2], (2,), lambda *what: None)
    assert threads() == before


def test_closing_ends_every_lane_after_what_it_carries(rig):
    store, slots, _ = rig
    before, arrived, entered, go = threads(), [], threading.Event(), threading.Event()

    def deliver(*what):
        entered.set()
        go.wait(20)
        arrived.append(what)

    copier = Copier(store, slots, (2, 2), deliver, between(rig, 8))
    assert len(threads()) == len(before) + 4
    copier.start(StartChunk(0, 3, 5, 0, link=0, staging_slot=0))
    assert entered.wait(10)
    threading.Timer(0.05, go.set).start()
    in_time(copier.close)
    assert len(arrived) == 1
    assert threads() == before
