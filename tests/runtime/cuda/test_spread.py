"""Experts over several devices, fake ones: bytes at home, and the bits of one device."""

from __future__ import annotations

import random

import pytest
import torch

from greenroom.core.foresight import Foresight
from greenroom.core.pieces import Pieces
from greenroom.core.scheduler import Scheduler
from greenroom.core.tiers import HostTier
from greenroom.errors import DeviceError, StoreError
from greenroom.policies import policy
from greenroom.runtime.cuda.engine import Host
from greenroom.runtime.cuda.host import HostMemory
from greenroom.runtime.cuda.spread import Spread, SpreadSlots
from greenroom.runtime.driver import Driver
from greenroom.runtime.fakes import FakeSlots, FakeStore
from greenroom.runtime.kernels import Kernel, LayerExperts, Routing, kernel
from greenroom.runtime.store import DiskStore
from tests.runtime.kernels.toys import EXPERTS as TOYS
from tests.runtime.kernels.toys import compute, experts, inputs, layer_of
from tests.runtime.rig import Ahead, Rig, in_time

LAYERS, EXPERTS = 3, 6
SHARES = Pieces.whole([0, 6, 12, 18], [1] * 3, devices=2).shares


class Two(Rig):
    """Two fake devices behind a tier of `kept` slots in host memory."""

    def __init__(self, catalog, capacity, kept, *, ahead=0, predictor=None, **faults) -> None:
        self.catalog = catalog
        self.store = FakeStore(DiskStore(catalog, chunk_bytes=8192), **faults)
        chunks = [self.store.chunks(e) for e in range(catalog.experts)]
        self.pieces = Pieces.whole(
            catalog.offsets, [x.nbytes for x in catalog.layouts], [len(c) for c in chunks], 2
        )
        tier = HostTier(self.pieces, kept, policy("lru")) if kept else None
        self.scheduler = Scheduler(
            self.pieces, capacity, policy("lru"), lanes=(2, 1), ahead=ahead, host=tier
        )
        each = [
            FakeSlots(n, catalog.slot_bytes, catalog.experts) for n in self.pieces.shares(capacity)
        ]
        self.slots = SpreadSlots(each, self.pieces.shares)
        self.driver = Driver(
            self.scheduler,
            self.store,
            self.slots,
            foresight=None if predictor is None else Foresight(predictor, catalog.offsets),
            links=("disk -> host", "host -> fake:0", "host -> fake:1"),
            between=HostMemory(Host(), chunks, self.scheduler.queue.seats, kept),
        )
        self.layer, self.computed = 0, []

    def holds(self, slot: int, piece: int) -> bool:
        """Whether a slot of the piece's own device holds it, whole."""
        layout = self.catalog.layouts[self.catalog.layer_of(piece)]
        device = self.slots.each[slot % 2]
        assert slot % 2 == self.pieces.home[piece]
        parts = (("up", piece), ("down", piece + 0.5))
        return all(bool((device.tensor(slot // 2, layout[n]) == v).all()) for n, v in parts)


@pytest.mark.parametrize("failing", [0.0, 0.05])
@pytest.mark.parametrize("kept", [0, 5, LAYERS * EXPERTS])
def test_every_expert_is_computed_at_home_from_its_own_bytes(disk, kept, failing):
    rng, chances = random.Random(kept), random.Random(7)
    predictor = Ahead(lambda layer: rng.sample(range(EXPERTS), 3))
    rig = Two(
        disk(LAYERS, EXPERTS), 8, kept, ahead=2, predictor=predictor, jitter=0.001,
        fails=lambda read: chances.random() < failing,
    )  # fmt: skip
    lost = 0

    def play() -> None:
        nonlocal lost
        for number in range(40):
            prefill = number % 13 == 0
            rig.begin(prefill, tokens=5 if prefill else 1, request=number // 13)
            for layer in range(LAYERS):
                chosen = sorted(rng.sample(range(EXPERTS), EXPERTS if prefill else 2))
                try:
                    rig.step(layer, *chosen)
                except StoreError:
                    lost += 1
            rig.driver.end_pass()
            if number % 7 == 3:
                rig.driver.resize((12, 5, 8)[number // 7 % 3])

    in_time(play)
    rig.settle()
    assert (lost > 0) == (failing > 0)
    s = rig.scheduler
    assert [slots.capacity for slots in rig.slots.each] == rig.pieces.shares(s.capacity)
    for piece in s.cache.residents().tolist():
        assert rig.holds(int(s.place[s.cache.state.slot_of[piece]]), piece)
    carried = [link.nbytes for link in rig.driver.meter.links]
    assert min(carried[1:]) > 0.3 * sum(carried[1:])
    in_time(rig.driver.close)


class Full(FakeSlots):
    """A device that has no room for more than five slots."""

    def trim(self, capacity: int) -> None:
        if capacity > 5:
            raise DeviceError("the GPU has no room")
        super().trim(capacity)


def test_where_one_device_has_no_room_all_stay_as_they_were():
    slots = SpreadSlots([FakeSlots(2, 64, 9), Full(2, 64, 9)], SHARES)
    slots.trim(10)
    assert [each.capacity for each in slots.each] == [5, 5]
    with pytest.raises(DeviceError, match="no room"):
        slots.trim(14)
    assert [each.capacity for each in slots.each] == [5, 5]
    assert slots.capacity == 10
    slots.trim(3)
    assert [each.capacity for each in slots.each] == [2, 1]


class Coarse(FakeSlots):
    """Gives memory back four slots at a time."""

    def fitting(self, capacity: int) -> int:
        return max(4, capacity // 4 * 4)


def test_what_fits_fits_on_every_device():
    slots = SpreadSlots([FakeSlots(9, 64, 9), Coarse(9, 64, 9)], SHARES)
    fitting = slots.fitting(15)
    assert SHARES(15) == [8, 7]
    assert SHARES(fitting)[1] == 4
    assert SHARES(fitting + 1)[1] == 5 or SHARES(fitting + 2)[1] == 5


def test_marks_are_left_on_the_devices_that_computed():
    class Marked(FakeSlots):
        def __init__(self) -> None:
            super().__init__(4, 64, 9)
            self.marks: list[list[int]] = []

        def computed(self, slots: list[int]) -> None:
            self.marks.append(slots)

    each = [Marked(), Marked(), FakeSlots(4, 64, 9)]
    SpreadSlots(each, SHARES).computed([0, 3, 4, 9, 5])
    assert each[0].marks == [[0, 1, 3]]
    assert each[1].marks == [[1]]


# ---- bits

HIDDEN, INNER = 40, 24  # Triton's interpreter takes its time


def toys(family: str, seed: int) -> tuple[LayerExperts, list[int]]:
    return layer_of(experts(family, torch.bfloat16, HIDDEN, INNER), seed=seed)


def spread(family: str, kind: Kernel) -> tuple[Spread, object, list[int]]:
    """A layer's experts over two devices with slots of their own, and each one's slot."""
    first, places = toys(family, seed=1)
    second, others = toys(family, seed=2)
    slots = SpreadSlots([first.slots, second.slots], SHARES)  # type: ignore[list-item]
    over = Spread(kind, slots)
    over.over(first, [torch.device("cpu")] * 2)
    at = [2 * (others[e] if e % 2 else places[e]) + e % 2 for e in range(TOYS)]
    for expert in range(TOYS):  # what is not at home is not there
        away, slot = (first, places[expert]) if expert % 2 else (second, others[expert])
        for spec in first.layout.tensors:
            away.slots.tensor(slot, spec).fill_(float("nan"))
    return over, first, at


@pytest.mark.parametrize("named", ["eager", "numba", "triton"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "muse_spark", "nemotron_h"])
def test_the_bits_are_those_of_one_device(family, named):
    if named == "triton" and torch.cuda.is_available():
        pytest.skip("tests/gpu has the compiled ones")
    for tokens in (1, 5):
        case = inputs(torch.bfloat16, tokens, hidden=HIDDEN, seed=tokens)
        layer, places = toys(family, seed=3)
        want = compute(kernel(named), layer, places, *case)
        count = len(case[1].unique())
        for waves in (None, [[i] for i in range(count)][::-1]):
            over, first, at = spread(family, kernel(named))
            assert torch.equal(compute(over, first, at, *case, waves=waves), want)


@pytest.mark.parametrize("named", ["eager", "numba", "triton"])
@pytest.mark.parametrize("home", [0, 1])
def test_a_step_may_be_on_one_device_alone(named, home):
    if named == "triton" and torch.cuda.is_available():
        pytest.skip("tests/gpu has the compiled ones")
    x, index, weights = inputs(torch.bfloat16, 2, top_k=2, hidden=HIDDEN)
    index[:] = torch.tensor([[home, home + 2], [home + 4, home]])
    layer, places = toys("qwen3_moe", seed=0)
    want = compute(kernel(named), layer, places, x, index, weights)
    over, first, at = spread("qwen3_moe", kernel(named))
    assert torch.equal(compute(over, first, at, x, index, weights), want)


def test_nothing_routed_here_is_nothing():
    over, first, _ = spread("qwen3_moe", kernel("eager"))
    x, index, weights = inputs(torch.bfloat16, 2, hidden=HIDDEN)
    step = over.begin(first, x, Routing.of(index.numpy() * 0 + TOYS, TOYS), weights)
    assert not over.combine(step).any()
