"""Host memory as kernels read it, a thread for the host's groups, and a driver over both."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch

from greenroom.core.events import Routed, StartChunk
from greenroom.core.layout import Copy, Extent
from greenroom.core.options.rules.rates import TRIES
from greenroom.errors import StoreError
from greenroom.runtime.cuda.co_compute import CoComputeKernel
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.host import HostMemory, in_place_copies
from greenroom.runtime.driver.host_worker import HostWorker
from greenroom.runtime.driver.meter import Meter
from greenroom.runtime.kernels.eager import EagerKernel
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.slots.host import HostSlots
from greenroom.runtime.store.disk import Chunk, DiskStore, cut
from tests.runtime.cuda.host_rig import HostComputeDriver
from tests.runtime.cuda.test_host import chunks_of
from tests.runtime.kernels.toys import compute, experts, inputs, layer_of
from tests.runtime.rig import in_time

LAYERS, EXPERTS = 3, 6


def test_experts_lie_in_a_slab_as_they_would_on_the_device(disk):
    catalog = disk(LAYERS, EXPERTS)
    chunks, store = chunks_of(catalog), DiskStore(catalog, chunk_bytes=8192)
    slab = HostMemory(Engine(), chunks, staging_slots=2, capacity=3, stride=catalog.slot_bytes)
    direct = HostSlots(1, catalog.slot_bytes)
    device = HostSlots(1, catalog.slot_bytes)
    for piece, slot in ((2, 0), (11, 2)):
        for number, chunk in enumerate(chunks[piece]):
            action = StartChunk(0, piece, 0, number, 0, -1, True, slot)
            slab.read_chunk(action, chunk, store.read, _staging())
            copies, data, start = slab.chunk_source(action, chunk)
            device.write(0, copies, data, start)
            direct.write(0, chunk.extent.copies, store.read(chunk, _staging()), chunk.start)
        layout = catalog.layouts[catalog.layer_of(piece)]
        for name, value in (("up", piece), ("down", piece + 0.5)):
            for slots, at in ((slab.slots, slot), (device, 0), (direct, 0)):
                assert bool((slots.tensor(at, layout[name]) == value).all())
    assert slab.slots.base % 64 == 0
    seated = StartChunk(0, 4, 0, 0, 0, staging_slot=1)
    slab.read_chunk(seated, chunks[4][0], store.read, _staging())
    copies, data, start = slab.chunk_source(seated, chunks[4][0])
    assert (copies, data.size, start) == (chunks[4][0].extent.copies, chunks[4][0].length, 0)
    slab.close()


def _staging():
    from greenroom.runtime.store.disk import Staging

    return Staging()


def test_weights_are_rearranged_only_once():
    """A matrix that is transposed and cast on its way in goes to the device as it lies."""
    source = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    turned = Copy(0, 64, (4, 3), (4, 16), (6, 2), "float32", "bfloat16")
    behind = Copy(48, 0, (1, 8), (8, 1), (8, 1), "uint8", "uint8")
    data = np.concatenate([source.numpy().view(np.uint8).ravel(), np.arange(8, dtype=np.uint8)])
    chunk = Chunk(Extent(0, 0, 56, (turned, behind)), 0, 56)
    device_slots, host_slots = HostSlots(2, 128, memory=np.zeros(256, np.uint8)), HostSlots(1, 128)
    device_slots.write(1, chunk.extent.copies, data, 0)
    host_slots.write(0, in_place_copies(chunk), device_slots.bytes(1), 0)
    assert np.array_equal(host_slots.bytes(0), device_slots.bytes(1))
    joined = torch.from_numpy(host_slots.bytes(0)[64:88].copy()).view(torch.bfloat16).view(4, 3)
    assert torch.equal(joined, source.T.bfloat16())


def test_a_chunk_is_copied_within_its_range():
    run = Copy(0, 100, (1, 9000), (9000, 1), (9000, 1), "uint8", "uint8")
    first, second, third = cut(Extent(0, 0, 9000, (run,)), 3000)
    assert [(c.source, c.target, c.nbytes) for c in in_place_copies(second)] == [(4196, 4196, 4096)]
    assert sum(c.nbytes for each in (first, second, third) for c in in_place_copies(each)) == 9000


def test_jobs_are_done_in_turn_and_their_errors_are_raised():
    meter, done, order = Meter.for_lanes(()), [], []
    worker = HostWorker(meter)
    inference = []

    def job() -> None:
        inference.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        order.append(threading.current_thread().name)

    def failing() -> None:
        raise ValueError("no")

    with torch.inference_mode():
        worker.start(job, done.append)
    worker.start(failing, done.append)
    worker.start(job, done.append)
    worker.wait()
    assert order == ["greenroom-host"] * 2
    assert [repr(error) for error in done] == ["None", "ValueError('no')", "None"]
    assert inference == [(True, False), (False, False)]
    assert meter.host_s > 0
    worker.close()
    assert not worker._thread.is_alive()


@pytest.mark.parametrize("host_s", [1e-5, 1e-3])
def test_real_threads_compute_every_expert_from_its_own_bytes(disk, host_s):
    rig, rng = HostComputeDriver(disk(LAYERS, EXPERTS), 8, 9, host_s, jitter=1e-3), random.Random(2)

    def play() -> None:
        for number in range(60):
            rig.begin(prefill=number % 7 == 0)
            for layer in range(LAYERS):
                rig.step(layer, *sorted(rng.sample(range(EXPERTS), rng.randint(1, 4))))

    in_time(play)
    rig.settle()
    assert rig.on_host == rig.scheduler.counts.on_host > 0
    for piece in rig.scheduler.residents().tolist():
        at = rig.scheduler.placement.tier_slots[rig.scheduler.placement.cache.state.slot_of[piece]]
        assert rig.holds(int(at), piece)
    assert not rig.tier.leases
    rig.driver.close()


def test_a_failed_read_ends_only_its_step(disk):
    fails = random.Random(5)
    rig = HostComputeDriver(
        disk(LAYERS, EXPERTS), 6, 7, 1e-5, jitter=1e-3, fails=lambda n: fails.random() < 0.1
    )
    failed, rng = [], random.Random(3)

    def play() -> None:
        for _ in range(50):
            rig.begin()
            for layer in range(LAYERS):
                try:
                    rig.step(layer, *sorted(rng.sample(range(EXPERTS), 3)))
                except StoreError:
                    failed.append(layer)

    in_time(play)
    rig.settle()
    assert failed
    assert rig.on_host > 0
    assert not rig.tier.leases
    assert not rig.scheduler.placement.cache.state.pinned.any()
    rig.driver.close()


def test_an_interruption_waits_for_what_the_host_computes(disk, monkeypatch):
    rig = HostComputeDriver(disk(LAYERS, EXPERTS), 6, 18, 1e-5)
    rig.begin()
    rig.step(0, 0, 1, 2)
    under_way, interrupted, go_on = (threading.Event() for _ in range(3))
    wait = rig.driver._host.wait

    def wait_noticed() -> None:
        interrupted.set()
        wait()

    monkeypatch.setattr(rig.driver._host, "wait", wait_noticed)

    def job(chosen: np.ndarray, slots: np.ndarray):
        def wait() -> None:
            under_way.set()
            assert go_on.wait(30)

        return wait

    def play() -> None:
        from greenroom.errors import Interrupted

        with pytest.raises(Interrupted):
            rig.driver.step(0, np.array([3, 4], np.int64), lambda *_: None, prepare_host_job=job)

    def interrupt() -> None:
        assert under_way.wait(30)
        rig.driver.interrupt()
        assert interrupted.wait(30)  # a step whose last job ends before it looks is complete
        go_on.set()

    in_time(play, interrupt)
    rig.driver.resume()
    rig.settle()
    assert not rig.tier.leases
    rig.begin()
    rig.step(0, 3, 4)
    rig.driver.close()


def test_a_thread_that_begins_a_step_leaves_that_of_another_thread_alone():
    """Steps take turns in the driver, but threads begin them and sum up outside of it."""
    layer, places = layer_of(experts("qwen3_moe", torch.bfloat16))
    x, index, weights = inputs(torch.bfloat16, 2)
    want = compute(EagerKernel(), layer, places, x, index, weights)
    kernel = CoComputeKernel(EagerKernel(), Engine(), layer.slots)
    kernel.prepare(layer)
    routing = Routing.of(index.numpy(), layer.num_experts)
    step = kernel.begin(layer, x, routing, weights)
    chosen = routing.experts.tolist()
    kernel.host_job(step, chosen, [places[expert] for expert in chosen])()
    another = threading.Thread(target=kernel.begin, args=(layer, x, routing, weights))
    another.start()
    another.join(30)
    assert torch.equal(kernel.combine(step), want)


def test_the_next_step_releases_what_an_interrupted_one_had_left_to_the_host(disk):
    rig = HostComputeDriver(disk(LAYERS, EXPERTS), 6, 18, 1e-5)
    rig.begin()
    for layer in (0, 1, 2):
        rig.step(layer, 0, 1, 2, 3)
    rig.settle()
    placement, driver = rig.scheduler.placement, rig.driver
    for _ in range(TRIES):
        rig.scheduler.option_calls.copied(10**6, 1.0)  # else a copy in order is tried
    routed = [layer * EXPERTS + e for layer in range(LAYERS) for e in range(4)]  # 12, for 6 slots
    absent = next(e for e in routed if not placement.has_slot(e))
    event = Routed(1, absent // EXPERTS, np.array([absent], np.int64))
    with driver.lock:
        misses = rig.scheduler.resident_steps.load(event, 0.0)
    assert misses is not None
    assert misses.on_host == [absent]
    assert rig.tier.leases == {absent}  # the thread is interrupted now
    rig.step(0, 4)
    rig.settle()
    assert not rig.tier.leases
    rig.driver.close()


def test_a_token_evicts_what_an_interrupted_step_had_pinned(disk):
    rig = HostComputeDriver(disk(LAYERS, EXPERTS), 8, 18, 1e3)
    rig.begin()
    for layer in (0, 1, 2):
        rig.step(layer, 0, 1, 2, 3, 4)
    rig.settle()
    driver, residents = rig.driver, rig.scheduler.resident_steps
    with driver.lock:
        event = Routed(1, 2, np.arange(12, 17))
        assert residents.serve_pinned(event, 0.0) is not None  # the thread is interrupted now
    driver.begin_exclusive()
    with driver.lock:
        misses = residents.load(Routed(2, 0, np.arange(4)), 0.0)
    assert misses is not None
    assert misses.loads.pieces == [0, 1, 2, 3]
    driver.close()
