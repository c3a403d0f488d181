"""Split experts through host memory to a device, by real threads with late and failed reads."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from greenroom.core.cache.scope import least_capacity
from greenroom.core.cache.state import group_sizes
from greenroom.core.events import StartChunk
from greenroom.core.layout import Copy, Extent
from greenroom.core.pieces import Pieces, Split
from greenroom.core.prefetch.foresight import Foresight
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.core.transfers.tiers import HostCache, HostTier, host_slot_groups
from greenroom.errors import StoreError
from greenroom.policies import policy
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.host import HostMemory
from greenroom.runtime.driver.driver import Driver
from greenroom.runtime.fakes import FakeSlots, FakeStore
from greenroom.runtime.slots.tier import MultiPoolTier
from greenroom.runtime.store.disk import Chunk, DiskStore, Staging, cut
from tests.runtime.rig import Ahead, Rig, in_time, play_passes

LAYERS, EXPERTS, SIZE = 3, 6, 3000
N, TOP = LAYERS * EXPERTS, SIZE * 4  # the top segment is `up`, the bottom one is `down`


class SegmentStore:
    """A store of top segments (ids 0 to N - 1) and bottom segments (from N) of a file's experts."""

    def __init__(self, disk: DiskStore, extents: Sequence[Extent]) -> None:
        self._disk = disk
        self._chunks = [
            tuple(cut(Extent(e.file, e.offset + at, TOP, (unsplit_copy(TOP),)), 8192))
            for at in (0, TOP)
            for e in extents
        ]

    def chunks(self, piece: int) -> tuple[Chunk, ...]:
        return self._chunks[piece]

    def read(self, chunk: Chunk, staging: Staging) -> np.ndarray:
        return self._disk.read(chunk, staging)

    def close(self) -> None:
        self._disk.close()


def unsplit_copy(nbytes: int) -> Copy:
    n = nbytes // 4
    return Copy(0, 0, (1, n), (nbytes, 4), (nbytes, 4), "float32", "float32")


class SegmentRig(Rig):
    """A rig whose experts are split, with a host tier; every part is checked as it is computed."""

    def __init__(self, catalog, capacity: int, tier_slots: int, ahead: int, predictor, **faults):
        super().__init__(catalog, capacity, (2, 2))
        self.driver.close()
        disk = DiskStore(catalog, chunk_bytes=8192)
        extents = [catalog.extents(e)[0] for e in range(N)]
        self.store = FakeStore(SegmentStore(disk, extents), **faults)
        chunks = [self.store.chunks(piece) for piece in range(2 * N)]
        split = Split((TOP,) * LAYERS, (TOP,) * LAYERS, 4)
        self.pieces = Pieces.with_split(catalog.offsets, split, [len(each) for each in chunks])
        assert capacity >= least_capacity(self.pieces, "shared")
        self.tier = HostTier(self.pieces, tier_slots, policy("lru")) if tier_slots else None
        self.scheduler = Scheduler(
            self.pieces, capacity, policy("lru"), lanes=(2, 2), ahead=ahead, host=self.tier
        )
        (tops,) = group_sizes(self.pieces, capacity, "shared")
        stride = -(-TOP // 64) * 64
        pools = [FakeSlots(tops, stride, reserve=N), FakeSlots(4, stride, reserve=4)]
        self.slots = MultiPoolTier(pools, capacity, lambda n: [tops, 4])
        groups = host_slot_groups(self.pieces, tier_slots) if tier_slots else []
        self.memory = HostMemory(
            Engine(), chunks, self.scheduler.view.staging_slots, 0, groups=groups
        )
        self.driver = Driver(
            self.scheduler, self.store, self.slots, links=("disk -> host", "host -> device"),
            foresight=Foresight(predictor, catalog.offsets), host_memory=self.memory,
        )  # fmt: skip
        self.tops_done: list[int] = []

    def segment(self, slot: int) -> np.ndarray:
        pool, number = self.slots.at(slot)
        return np.unique(pool.bytes(number)[:TOP].view(np.float32))

    def compute(self, experts: np.ndarray, slots: np.ndarray, part: int) -> None:
        for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
            identity = self.catalog.offsets[self.layer] + expert
            assert self.segment(slot).tolist() == [identity + 0.5 * part]
            assert (expert in self.tops_done) == bool(part)
            (self.computed if part else self.tops_done).append(expert)

    def step(self, layer: int, *experts: int) -> None:
        self.tops_done = []
        super().step(layer, *experts)

    def check(self) -> None:
        """Check that all bytes are where the scheduler says, and that nothing is pinned."""
        s = self.scheduler
        assert s.step is None
        assert not s.placement.cache.state.pinned.any()
        assert not s.placement.secondary._busy
        for piece in s.residents().tolist():
            assert self.segment(s.placement.slot(piece)).tolist() == [piece]
        for expert, slot in s.placement.secondary.slot_of.items():
            assert s.placement.secondary.is_complete(expert)
            at = s.placement.secondary_tier_slot(slot)
            assert self.segment(at).tolist() == [expert + 0.5]
        if self.tier is None:
            return
        assert not self.tier.leases
        for each in self.tier.caches:
            assert not (isinstance(each, HostCache) and each.cache.state.pinned.any())


@pytest.mark.parametrize("failing", [0.0, 0.05])
@pytest.mark.parametrize("tier_slots", [0, 1, 5, N])
def test_every_segment_is_computed_from_its_own_bytes(disk, tier_slots, failing):
    rng, chances = random.Random(tier_slots), random.Random(7)
    predictor = Ahead(lambda layer: rng.sample(range(EXPERTS), 3))
    rig = SegmentRig(
        disk(LAYERS, EXPERTS, SIZE), 7, tier_slots, 3, predictor,
        jitter=0.001, fails=lambda read: chances.random() < failing,
    )  # fmt: skip
    failed: list[int] = []
    in_time(lambda: failed.append(play_passes(rig, rng)))
    rig.settle()
    rig.check()
    assert (failed[0] > 0) == (failing > 0)
    if rig.tier is not None:
        assert rig.tier.hits > 0 or tier_slots == 1  # with one slot they depend on the threads
        if not failing and rig.tier.holds_all:  # nothing is read twice
            assert rig.store.reads <= sum(len(rig.store.chunks(piece)) for piece in range(2 * N))
    in_time(rig.driver.close)


def test_an_exception_between_top_and_bottom_leaves_both_tiers_usable(disk):
    rng = random.Random(1)
    rig = SegmentRig(
        disk(LAYERS, EXPERTS, SIZE), 7, 5, 3, Ahead(lambda layer: []), jitter=0.001
    )  # fmt: skip
    compute, failed = rig.compute, []

    def stumbling(experts, slots, part) -> None:
        if part and rng.random() < 0.2:
            raise StoreError("no")
        compute(experts, slots, part)

    rig.compute = stumbling  # type: ignore[method-assign]
    lock = threading.Lock()

    def play() -> None:
        with lock:
            failed.append(play_passes(rig, rng))

    in_time(play)
    rig.settle()
    rig.check()
    assert failed[0] > 0
    rig.compute = compute  # type: ignore[method-assign]
    rig.begin()
    rig.step(0, 1, 2)
    rig.driver.close()


def test_host_memory_has_slots_of_the_size_of_each_group(disk):
    """Three groups: two of small slots, one of large ones; none overlaps another's bytes."""
    catalog = disk(LAYERS, EXPERTS, SIZE)
    extents = [catalog.extents(e)[0] for e in range(N)]
    store = SegmentStore(DiskStore(catalog, chunk_bytes=8192), extents)
    small = [store.chunks(piece) for piece in range(2 * N)]
    chunks = [small[0] + small[N], *small[1:N], *[()] * N]
    groups = [(2, np.arange(1, 6)), (1, np.array([0])), (0, np.array([6])), (3, np.arange(7, 18))]
    memory = HostMemory(Engine(), chunks, 4, 0, groups=groups)
    assert memory.capacity == 6
    rooms = [sum(-(-c.length // 4096) * 4096 + 8192 for c in chunks[piece]) for piece in (1, 0)]
    assert memory.nbytes == 4 * memory.staging_bytes + 5 * rooms[0] + rooms[1]
    places = []
    for slot, piece in ((0, 1), (1, 2), (2, 0), (3, 7), (4, 8), (5, 9)):
        for number in range(len(chunks[piece])):
            action = StartChunk(0, piece, 0, number, 0, -1, True, slot)
            place = memory._place(action)
            begin = place.ctypes.data - memory._bytes.ctypes.data
            places.append((begin, begin + place.size))
    ends = sorted(places)
    assert all(a[1] <= b[0] for a, b in pairwise(ends))
    assert ends[0][0] == 4 * memory.staging_bytes
    assert ends[-1][1] == memory.nbytes
    memory.close()
    store.close()
