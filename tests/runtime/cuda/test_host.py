"""Host memory behind a device, and a whole driver over it: real threads, faults, any arrival."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
import torch

from greenroom.config import show_bytes
from greenroom.core.events import StartChunk
from greenroom.errors import DeviceError
from greenroom.runtime.cuda.engine import Engine, device_errors, first_line
from greenroom.runtime.cuda.host import HostMemory, slot_sizes
from greenroom.runtime.cuda.ids import to_host
from greenroom.runtime.store.disk import BLOCK, DiskStore, Staging, cut
from tests.runtime.rig import Ahead, Rig, in_time, play_passes

LAYERS, EXPERTS = 3, 6


class Registered(Engine):
    """An engine that counts registrations, and refuses them after some, with a given message."""

    def __init__(self, refusal: str | None = None, after: int = 0) -> None:
        self.refusal, self.after = refusal, after
        self.ranges: list[tuple[int, int]] = []
        self.undone: list[int] = []

    def register(self, address: int, nbytes: int) -> str | None:
        self.ranges.append((address, nbytes))
        return self.refusal if len(self.ranges) > self.after else None

    def unregister(self, address: int) -> None:
        self.undone.append(address)


def chunks_of(catalog, chunk_bytes: int = 8192):
    return [
        tuple(c for extent in catalog.extents(e) for c in cut(extent, chunk_bytes))
        for e in range(catalog.experts)
    ]


def test_staging_slots_and_tier_slots_are_one_reservation_registered_once(disk):
    catalog = disk(LAYERS, EXPERTS)
    chunks, engine = chunks_of(catalog), Registered()
    staging_slot, slot = slot_sizes(chunks)
    memory, shares = HostMemory(engine, chunks, staging_slots=4, capacity=5), list[float]()
    assert not engine.ranges
    memory.pin(shares.append)
    assert shares == [1]
    assert [nbytes for _, nbytes in engine.ranges] == [4 * staging_slot + 5 * slot]
    assert engine.ranges[0][0] % BLOCK == 0
    memory.close()
    memory.close()
    assert engine.undone == [engine.ranges[0][0]]


def test_memory_is_registered_in_pieces_of_whole_slots(disk, caplog):
    catalog = disk(LAYERS, EXPERTS)
    chunks, engine, shares = chunks_of(catalog), Registered(), list[float]()
    staging_slot, slot = slot_sizes(chunks)
    memory = HostMemory(engine, chunks, staging_slots=3, capacity=5)
    memory.pin(shares.append, piece=2 * slot)
    begins = [address - engine.ranges[0][0] for address, _ in engine.ranges]
    places = {n * staging_slot for n in range(3)} | {3 * staging_slot + n * slot for n in range(5)}
    assert set(begins) <= places
    assert len(begins) == len(shares) > 2
    assert shares[-1] == 1
    assert [sum(n for _, n in engine.ranges[:i]) for i in range(len(begins))] == begins
    assert sum(nbytes for _, nbytes in engine.ranges) == memory.nbytes
    memory.close()
    assert sorted(engine.undone) == [address for address, _ in engine.ranges]
    engine = Registered("no more", after=1)
    memory = HostMemory(engine, chunks, staging_slots=3, capacity=5)
    with caplog.at_level(logging.WARNING):
        memory.pin(piece=2 * slot)
    assert f"{show_bytes(memory.nbytes - engine.ranges[0][1])} of" in caplog.text
    memory.close()
    assert engine.undone == [engine.ranges[0][0]]


def test_every_chunk_has_its_own_place(disk):
    catalog = disk(LAYERS, EXPERTS)
    chunks = chunks_of(catalog)
    store, memory = DiskStore(catalog, chunk_bytes=8192), HostMemory(Engine(), chunks, 4, 3)
    actions = [
        StartChunk(0, piece, 0, chunk, 0, -1, True, slot)
        for piece, slot in ((2, 0), (7, 1), (11, 2))
        for chunk in range(len(chunks[piece]))
    ]
    seated = [StartChunk(0, 4, 0, chunk, 0, staging_slot=chunk) for chunk in range(len(chunks[4]))]
    for action in actions + seated:
        memory.read_chunk(action, chunks[action.piece][action.chunk], store.read, Staging())
    for piece in (2, 7, 11, 4):
        own_actions = [a for a in actions + seated if a.piece == piece]
        mine = [memory.chunk_source(a, chunks[piece][a.chunk])[1] for a in own_actions]
        floats = np.concatenate(mine).view(np.float32)
        assert np.array_equal(np.unique(floats), [piece, piece + 0.5])
    store.close()


def test_memory_that_cannot_be_registered_is_reported_and_used(disk, caplog):
    catalog = disk(LAYERS, EXPERTS)
    with caplog.at_level(logging.WARNING):
        memory = HostMemory(Registered("operation not permitted"), chunks_of(catalog), 4, 2)
        memory.pin()
    (record,) = caplog.records
    assert "could not be registered with the GPU (operation not permitted)" in record.message
    assert "--host-memory" in record.message
    store = DiskStore(catalog, chunk_bytes=8192)
    action = StartChunk(0, 3, 0, 0, 0, -1, True, 1)
    chunk = chunks_of(catalog)[3][0]
    memory.read_chunk(action, chunk, store.read, Staging())
    assert memory.chunk_source(action, chunk)[1].size == chunk.length
    store.close()
    memory.close()
    assert memory.engine.undone == []


def test_an_impossible_reservation_is_one_clear_line(disk):
    with pytest.raises(DeviceError, match="no host memory for"):
        HostMemory(Engine(), chunks_of(disk()), 4, 1 << 50)


@pytest.mark.parametrize("failing", [0.0, 0.05])
@pytest.mark.parametrize("tier_slots", [0, 1, 5, LAYERS * EXPERTS])
def test_every_expert_is_computed_from_its_own_bytes(disk, tier_slots, failing):
    rng, chances = random.Random(tier_slots), random.Random(7)
    predictor = Ahead(lambda layer: rng.sample(range(EXPERTS), 3))
    rig = Rig(
        disk(LAYERS, EXPERTS), 7, (2, 2), ahead=3, predictor=predictor, tier_slots=tier_slots,
        jitter=0.001, fails=lambda read: chances.random() < failing,
    )  # fmt: skip
    failed: list[int] = []
    in_time(lambda: failed.append(play_passes(rig, rng)))
    rig.settle()
    rig.check()
    assert (failed[0] > 0) == (failing > 0)
    if rig.tier is not None:
        assert not rig.tier.leases
        assert rig.tier.hits > 0 or tier_slots == 1
        if not failing and rig.tier.holds_all:
            assert rig.store.reads <= sum(map(len, (rig.store.chunks(e) for e in range(18))))
    in_time(rig.driver.close)


def test_ids_on_a_cpu_are_the_tensor_s_own():
    index, weights = torch.tensor([[3, 1]], dtype=torch.int32), torch.rand(1, 2).bfloat16()
    chosen, host_weights = to_host(index, weights)
    assert chosen.dtype == np.int64
    assert chosen.tolist() == [[3, 1]]
    assert host_weights.tolist() == weights.float().tolist()
    assert to_host(index, None)[1] is None


def test_an_error_of_a_gpu_is_one_line():
    with (
        pytest.raises(
            DeviceError, match=r"the GPU failed: CUDA error: unspecified .*; restart"
        ) as e,
        device_errors(),
    ):
        raise RuntimeError(
            "CUDA error: unspecified launch failure\nCompile with TORCH_USE_CUDA_DSA"
        )
    assert "\n" not in str(e.value)
    with (
        pytest.raises(DeviceError, match="has no room for 2 GiB of slots"),
        device_errors("2 GiB of slots"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    with pytest.raises(RuntimeError, match="shapes"), device_errors():
        raise RuntimeError("shapes do not fit")
    assert first_line(RuntimeError()) == "RuntimeError"
