"""A driver whose host processor computes experts too."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from greenroom.core.cost import Costs, Link, Work
from greenroom.core.options.rules.rates import Rates
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.core.transfers.tiers import HostTier
from greenroom.policies import policy
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.host import HostMemory
from greenroom.runtime.driver.driver import Driver
from greenroom.runtime.fakes import FakeSlots, FakeStore
from greenroom.runtime.store.disk import DiskStore
from tests.runtime.rig import Rig

CoCompute = pytest.importorskip("greenroom.core.options.rules.cocompute").CoCompute


class HostComputeDriver(Rig):
    """A rig with a slab between two links, whose host computes too, and checks what it reads."""

    def __init__(self, catalog, capacity: int, tier_slots: int, host_s: float, **faults) -> None:
        super().__init__(catalog, capacity, (2, 1), ahead=2)
        self.driver.close()
        self.store = FakeStore(DiskStore(catalog, chunk_bytes=8192), **faults)
        chunks = [self.store.chunks(e) for e in range(catalog.experts)]
        nbytes = catalog.slot_bytes
        costs = Costs(
            (Link(1e9), Link(nbytes / 1e-3)), Work.constant(1e-4), Work.constant(0.0),
            host=Work.constant(host_s),
        )  # fmt: skip
        self.tier = HostTier(self.pieces, tier_slots, policy("lru"))
        self.scheduler = Scheduler(
            self.pieces, capacity, policy("lru"), lanes=(2, 1), ahead=2, host=self.tier,
            options=[CoCompute(Rates(costs, nbytes))],
        )  # fmt: skip
        self.slots = FakeSlots(capacity, nbytes, reserve=catalog.experts)
        staging_slots = self.scheduler.transfers.queue.staging_slots
        self.slab = HostMemory(Engine(), chunks, staging_slots, tier_slots, stride=nbytes)
        self.driver = Driver(
            self.scheduler, self.store, self.slots, links=("disk -> host", "host -> device"),
            host_memory=self.slab,
        )  # fmt: skip
        self.on_host = 0

    def step(self, layer: int, *experts: int) -> None:
        """One step; what the host is given is checked in its own thread."""
        self.layer, self.computed = layer, []
        lock = threading.Lock()

        def compute(chosen: np.ndarray, slots: np.ndarray) -> None:
            with lock:
                self.compute(chosen, slots)

        def job(chosen: np.ndarray, slots: np.ndarray):
            def check() -> None:
                assert threading.current_thread().name == "greenroom-host"
                layout = self.catalog.layouts[layer]
                for expert, slot in zip(chosen.tolist(), slots.tolist(), strict=True):
                    identity = self.catalog.offsets[layer] + expert
                    for name, value in (("up", identity), ("down", identity + 0.5)):
                        assert bool((self.slab.slots.tensor(slot, layout[name]) == value).all())
                    with lock:
                        self.computed.append(expert)
                        self.on_host += 1

            return check

        self.driver.step(layer, np.array(experts, np.int64), compute, prepare_host_job=job)
        assert sorted(self.computed) == list(experts)
