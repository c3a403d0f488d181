"""Calibration of an expert's transfer and compute costs, before a model's first forward pass.

The measurements take a few milliseconds and overwrite slots, which are still empty. The disk is not
measured here: 1 GB/s is assumed until reads of experts give its real bandwidth.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from greenroom.core.cost import Costs, Link, Work
from greenroom.core.layout import Copy
from greenroom.runtime.cuda.co_compute import CoComputeKernel
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.kernels.base import Kernel, KernelStep
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.slots.host import HostSlots
from greenroom.runtime.slots.tier import Tier

DISK, BUS, DEVICE, HOST = 1e9, 10e9, 200e9, 10e9  # bytes a second of an ordinary machine
TOKENS = (1, 16, 64)
TRIES = 3  # the first one is slower: cold caches and clocks
TOUCHED = 4  # slots of host memory: more than the processor's cache holds


def nominal_costs(nbytes: int) -> Costs:
    """Return assumed transfer and compute costs of an expert of `nbytes` bytes.

    They are those of an ordinary machine; nothing is measured.
    """
    links = Link(DISK), Link(BUS)
    expert, host = (Work.constant(nbytes / rate) for rate in (DEVICE, HOST))
    return Costs(links, expert, Work.constant(0.0), host=host)


def calibrate(
    both: CoComputeKernel, layer: LayerExperts, engine: Engine, slots: Tier, slab: HostSlots
) -> Costs:
    """Measure the transfer and compute costs of a layer's experts on this machine.

    both: the kernel that computes experts on the GPU and on the host processor
    slots: slots on the GPU; the first is overwritten
    slab: slots in host memory, each of the size of an expert; the first four are overwritten
    """
    touched = min(TOUCHED, slab.capacity)
    for slot in range(touched):
        slab.bytes(slot)[:] = 0
    nbytes = slab.stride
    run = Copy(0, 0, (1, nbytes), (nbytes, 1), (nbytes, 1), "uint8", "uint8")
    pool, slot = slots.at(0)
    moved = shortest_time([lambda: pool.write(slot, (run,), slab.bytes(0), 0)] * TRIES)
    on_device, on_host = [], []
    for tokens in TOKENS:
        step = trial_step(both, layer, engine, tokens)

        def group(step: KernelStep = step) -> None:
            both.compute_group(step, [0], [0])
            engine.wait(engine.mark())

        jobs = [both.host_job(step, [0], [n % touched]) for n in range(TRIES + touched)]
        on_device.append((tokens, shortest_time([group] * TRIES)))
        on_host.append((tokens, shortest_time(jobs)))
    links = Link(DISK), Link(nbytes / moved)
    return Costs(links, Work(tuple(on_device)), Work.constant(0.0), host=Work(tuple(on_host)))


def trial_step(kernel: Kernel, layer: LayerExperts, engine: Engine, tokens: int) -> KernelStep:
    """Begin a trial computation of an MoE layer: all tokens are zeros and choose expert 0."""
    x = torch.zeros(tokens, layer.hidden, dtype=layer.dtype, device=engine.device)
    weights = torch.ones(tokens, 1, dtype=layer.dtype, device=engine.device)
    routing = Routing.of(np.zeros((tokens, 1), np.int64), 1)
    return kernel.begin(layer, x, routing, weights)


def shortest_time(works: list[Callable[[], None]]) -> float:
    """Call all functions in turn; return the shortest duration of a call, in seconds.

    The first call is not counted, since caches are cold. The result is never 0, since callers
    divide by it.
    """
    times = []
    for work in works:
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return max(1e-7, min(times[1:]))
