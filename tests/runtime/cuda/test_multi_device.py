"""Experts over several devices, fake ones: bytes at home, and the bits of one device."""

from __future__ import annotations

import random

import pytest
import torch

from greenroom.core.layout import TensorSpec
from greenroom.core.pieces import Pieces
from greenroom.core.plan import EXACT, LOW, SKIP
from greenroom.core.prefetch.foresight import Foresight
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.core.transfers.tiers import HostTier
from greenroom.policies import policy
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.host import HostMemory
from greenroom.runtime.cuda.multi_device import MultiDeviceKernel
from greenroom.runtime.driver.driver import Driver
from greenroom.runtime.fakes import FakeSlots, FakeStore
from greenroom.runtime.kernels.approximate import ApproximateKernel, ExpertsWithCopies
from greenroom.runtime.kernels.base import Kernel, KernelStep
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.kernels.segments import SegmentedKernel
from greenroom.runtime.kernels.table import make_kernel
from greenroom.runtime.slots.tier import MultiPoolTier
from greenroom.runtime.store.disk import DiskStore
from tests.runtime.kernels.toys import EXPERTS as TOYS
from tests.runtime.kernels.toys import ToySlots, compute, experts, inputs, layer_of
from tests.runtime.kernels.triton.test_kernel import in_segments
from tests.runtime.rig import Ahead, Rig, in_time, play_passes

LAYERS, EXPERTS = 3, 6
pytestmark = pytest.mark.interpreted
SHARES = Pieces.unsplit([0, 6, 12, 18], [1] * 3, devices=2).slots_per_device


class Two(Rig):
    """Two fake devices behind a tier of `tier_slots` slots in host memory."""

    def __init__(self, catalog, capacity, tier_slots, *, ahead=0, predictor=None, **faults) -> None:
        self.catalog = catalog
        self.store = FakeStore(DiskStore(catalog, chunk_bytes=8192), **faults)
        chunks = [self.store.chunks(e) for e in range(catalog.experts)]
        self.pieces = Pieces.unsplit(
            catalog.offsets, [x.nbytes for x in catalog.layouts], [len(c) for c in chunks], 2
        )
        tier = HostTier(self.pieces, tier_slots, policy("lru")) if tier_slots else None
        self.scheduler = Scheduler(
            self.pieces, capacity, policy("lru"), lanes=(2, 1), ahead=ahead, host=tier
        )
        each = [
            FakeSlots(n, catalog.slot_bytes, catalog.experts)
            for n in self.pieces.slots_per_device(capacity)
        ]
        self.slots = MultiPoolTier(each, capacity, self.pieces.slots_per_device)
        self.driver = Driver(
            self.scheduler,
            self.store,
            self.slots,
            foresight=None if predictor is None else Foresight(predictor, catalog.offsets),
            links=("disk -> host", "host -> fake:0", "host -> fake:1"),
            host_memory=HostMemory(
                Engine(), chunks, self.scheduler.transfers.queue.staging_slots, tier_slots
            ),
        )
        self.layer, self.computed = 0, []

    def holds(self, slot: int, piece: int) -> bool:
        """Does a slot of the piece's home device hold all of its bytes?"""
        layout = self.catalog.layouts[self.catalog.layer_of(piece)]
        device = self.slots.pools[slot % 2]
        assert slot % 2 == self.pieces.home_device[piece]
        parts = (("up", piece), ("down", piece + 0.5))
        return all(bool((device.tensor(slot // 2, layout[n]) == v).all()) for n, v in parts)


@pytest.mark.parametrize("failing", [0.0, 0.05])
@pytest.mark.parametrize("tier_slots", [0, 5, LAYERS * EXPERTS])
def test_every_expert_is_computed_on_its_home_device_from_its_own_bytes(disk, tier_slots, failing):
    rng, chances = random.Random(tier_slots), random.Random(7)
    predictor = Ahead(lambda layer: rng.sample(range(EXPERTS), 3))
    rig = Two(
        disk(LAYERS, EXPERTS), 8, tier_slots, ahead=2, predictor=predictor, jitter=0.001,
        fails=lambda read: chances.random() < failing,
    )  # fmt: skip
    failed: list[int] = []

    def resize(number: int) -> None:
        if number % 7 == 3:
            rig.driver.resize((12, 5, 8)[number // 7 % 3])

    in_time(lambda: failed.append(play_passes(rig, rng, resize)))
    rig.settle()
    assert (failed[0] > 0) == (failing > 0)
    s = rig.scheduler
    assert [slots.capacity for slots in rig.slots.pools] == rig.pieces.slots_per_device(s.capacity)
    for piece in s.residents().tolist():
        assert rig.holds(s.placement.slot(piece), piece)
    carried = [link.nbytes for link in rig.driver.meter.links]
    assert min(carried[1:]) > 0.3 * sum(carried[1:])
    in_time(rig.driver.close)


# ---- bits

HIDDEN, INNER = 40, 24  # Triton's interpreter takes its time


def toys(family: str, seed: int) -> tuple[LayerExperts, list[int]]:
    return layer_of(experts(family, torch.bfloat16, HIDDEN, INNER), seed=seed)


def spread(family: str, kind: Kernel) -> tuple[MultiDeviceKernel, object, list[int]]:
    """A layer's experts over two devices with slots of their own, and each one's slot."""
    first, places = toys(family, seed=1)
    second, others = toys(family, seed=2)
    slots = MultiPoolTier([first.slots, second.slots], 2 * TOYS, SHARES)  # type: ignore[list-item]
    over = MultiDeviceKernel(kind, slots, [torch.device("cpu")] * 2)
    over.prepare(first)
    at = [2 * (others[e] if e % 2 else places[e]) + e % 2 for e in range(TOYS)]
    for expert in range(TOYS):  # what is not at home is not there
        away, slot = (first, places[expert]) if expert % 2 else (second, others[expert])
        for spec in first.layout.tensors:
            away.slots.tensor(slot, spec).fill_(float("nan"))
    return over, first, at


@pytest.mark.parametrize("named", ["eager", "native", "triton"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "muse_spark", "nemotron_h"])
def test_the_bits_are_those_of_one_device(family, named):
    for tokens in (1, 5):
        case = inputs(torch.bfloat16, tokens, hidden=HIDDEN, seed=tokens)
        layer, places = toys(family, seed=3)
        want = compute(make_kernel(named), layer, places, *case)
        count = len(case[1].unique())
        for groups in (None, [[i] for i in range(count)][::-1]):
            over, first, at = spread(family, make_kernel(named))
            assert torch.equal(compute(over, first, at, *case, groups=groups), want)


@pytest.mark.parametrize("named", ["eager", "native", "triton"])
@pytest.mark.parametrize("home", [0, 1])
def test_a_step_may_use_only_one_device(named, home):
    x, index, weights = inputs(torch.bfloat16, 2, top_k=2, hidden=HIDDEN)
    index[:] = torch.tensor([[home, home + 2], [home + 4, home]])
    layer, places = toys("qwen3_moe", seed=0)
    want = compute(make_kernel(named), layer, places, x, index, weights)
    over, first, at = spread("qwen3_moe", make_kernel(named))
    assert torch.equal(compute(over, first, at, x, index, weights), want)


def test_a_layer_on_the_second_device_is_summed_there():
    over, first, at = spread("qwen3_moe", make_kernel("eager"))
    x, index, weights = inputs(torch.bfloat16, 2, top_k=2, hidden=HIDDEN)
    index[:] = torch.tensor([[1, 3], [5, 1]])
    step = over.begin(first, x, Routing.of(index.numpy(), TOYS), weights)
    step.compute_group([1, 3, 5], [at[1], at[3], at[5]])
    assert step.total().any()
    assert set(step._steps) == {1}  # nothing was begun on the first one
    step = over.begin(first, x, Routing.of(index.numpy(), TOYS), weights)
    step.compute_group([1, 3, 5], [at[1], at[3], at[5]])
    step.main_step.skip_experts([])  # the host has added outputs there
    step.total()
    assert set(step._steps) == {0, 1}


@pytest.mark.parametrize("named", ["eager", "native", "triton"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_segments_have_the_bits_of_one_device(family, named):
    """Pools of slots: tops of both devices, then their bottoms."""
    module = experts(family, torch.bfloat16, hidden=64, inner=192)
    x, index, weights = inputs(torch.bfloat16, 2, top_k=2, hidden=64)
    (one, _), (first, _), (second, _) = (in_segments(module, 1) for _ in range(3))
    pools = [pool for kind in zip(first._slots, second._slots, strict=True) for pool in kind]
    for expert in range(TOYS):  # what is not at home is not there
        for pool in pools[(expert + 1) % 2 :: 2]:
            pool.tensor(expert, TensorSpec("", (pool.stride,), "uint8", 0)).fill_(255)
    kernel = SegmentedKernel(make_kernel(named), 2)
    over = MultiDeviceKernel(kernel, MultiPoolTier(pools, 4, SHARES), [torch.device("cpu")] * 2)
    over.prepare(first)
    for chosen in ([0, 1, 2], [1, 3, 5]):  # the latter on the second device only
        index[:] = torch.tensor([chosen[:2], chosen[1:]])
        routing = Routing.of(index.numpy(), TOYS)
        steps = kernel.begin(one, x, routing, weights), over.begin(first, x, routing, weights)
        for part in (0, 1):
            kernel.compute_group(steps[0], chosen, [2 * e + part for e in chosen], part)
            over.compute_group(steps[1], chosen, [4 * e + 2 * part + e % 2 for e in chosen], part)
        assert torch.equal(over.combine(steps[1]), kernel.combine(steps[0]))


@pytest.mark.parametrize("named", ["eager", "native", "triton"])
def test_copies_and_skipped_experts_have_the_bits_of_one_device(named):
    """Pools of slots: exact experts of both devices, then copies."""
    x, index, weights = inputs(torch.bfloat16, 3, hidden=HIDDEN)
    skipped, *chosen = index.unique().tolist()
    module, layers, places = experts("qwen3_moe", torch.bfloat16, HIDDEN, INNER), [], []
    for seed in range(2):
        exact, at = layer_of(module, seed=seed)
        low, low_at = layer_of(experts("qwen3_moe", torch.bfloat16, HIDDEN, INNER, 1), seed=seed)
        copies = low.layout, low.slots
        layers.append(ExpertsWithCopies(module, exact.layout, exact.slots, copies))
        places.append((at, low_at))
    pools = [each.slots for each in layers] + [each.low.slots for each in layers]
    kernel = ApproximateKernel(make_kernel(named), 2)
    over = MultiDeviceKernel(kernel, MultiPoolTier(pools, 4, SHARES), [torch.device("cpu")] * 2)
    over.prepare(layers[0])
    routing = Routing.of(index.numpy(), TOYS)
    steps = kernel.begin(layers[0], x, routing, weights), over.begin(layers[0], x, routing, weights)
    for part, group in ((EXACT, chosen[::2]), (LOW, chosen[1::2]), (SKIP, [skipped])):
        slots = [2 * places[0][part][e] + part if part != SKIP else -1 for e in group]
        kernel.compute_group(steps[0], group, slots, part)
        on_two = [
            4 * places[e % 2][part][e] + 2 * part + e % 2 if part != SKIP else -1 for e in group
        ]
        over.compute_group(steps[1], group, on_two, part)
    want = kernel.combine(steps[0])
    assert torch.equal(over.combine(steps[1]), want)
    assert not torch.equal(want, compute(make_kernel(named), exact, at, x, index, weights))


def test_a_step_without_experts_returns_zeros():
    over, first, _ = spread("qwen3_moe", make_kernel("eager"))
    x, index, weights = inputs(torch.bfloat16, 2, hidden=HIDDEN)
    step = over.begin(first, x, Routing.of(index.numpy() * 0 + TOYS, TOYS), weights)
    assert not over.combine(step).any()


def test_a_device_gets_its_inputs_without_a_look_at_its_slots(monkeypatch):
    """A matrix in the order of fields is joined where a kernel asks for it: a copy of its bytes."""
    over, first, _ = spread("qwen3_moe", make_kernel("triton"))
    x, index, weights = inputs(torch.bfloat16, 2, hidden=HIDDEN)
    step = over.begin(first, x, Routing.of(index.numpy(), TOYS), weights)
    monkeypatch.setattr(ToySlots, "tensor", None)
    monkeypatch.setattr(over.kernel, "begin", lambda layer, *inputs: KernelStep(layer, *inputs))
    assert step._device_step(1).layer is over._layers[id(first)][1]
