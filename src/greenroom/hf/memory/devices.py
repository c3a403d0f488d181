"""Devices that compute a model's experts, their links and their kernels."""

from __future__ import annotations

import logging
from importlib.util import find_spec

from greenroom.errors import UsageError
from greenroom.hf.memory.setup import ModelSetup
from greenroom.runtime.cuda.engine import Cuda, Engine
from greenroom.runtime.kernels.table import GPU_KERNEL

COMPILED = "numba", "rounded"  # kernels that read dense matrices as they are stored
IN_FLIGHT = 2  # chunks that are copied to a GPU at a time: queued copies cannot be cancelled
LINKS = ("disk -> host", "host -> device")

log = logging.getLogger(__name__)


def engine_for(setup: ModelSetup, number: int) -> Engine:
    """Return one of a run's GPUs by number; the first has the dense weights."""
    return Cuda(setup.devices[number])


def engines_for(setup: ModelSetup) -> list[Engine]:
    """Return all GPUs of a run; none where expert slots are in host memory."""
    return [engine_for(setup, n) for n in range(len(setup.devices))] if setup.cuda else []


def lanes_of(setup: ModelSetup) -> tuple[int, ...]:
    """Return each link's concurrent transfers: from disk to host, and to GPU."""
    if setup.cuda:
        return setup.readers, IN_FLIGHT
    return (setup.readers, 1) if setup.fake else (setup.readers,)


def links_of(setup: ModelSetup) -> tuple[str, ...]:
    """Return the names of a run's links (disk to host, host to each device).

    Each of several devices has a last link of its own.
    """
    chain = LINKS[: len(lanes_of(setup))]
    if len(setup.devices) == 1:
        return chain
    name = "cuda" if setup.cuda else "fake"
    return (*chain[:-1], *(f"host -> {name}:{number}" for number in setup.devices))


def kernels_of(setup: ModelSetup) -> str:
    """Choose the kernels that compute experts; UsageError where the device cannot run them."""
    if setup.kernels == "auto":
        if not setup.cuda:
            return "numba"
        if find_spec("triton") is not None:
            return GPU_KERNEL
        log.warning(
            "Triton is not installed (pip install 'greenroom[gpu]'): the eager kernels are slower"
        )
        return "eager"
    if setup.cuda and setup.kernels in COMPILED:
        raise UsageError(
            f"--kernels {setup.kernels} is for a CPU: with --device cuda use triton or eager"
        )
    return setup.kernels


def host_computes(setup: ModelSetup) -> bool:
    """Check that the host's CPU computes experts missing on the GPU.

    Warns where it was asked to and cannot.
    """
    if not setup.config.uses_host():
        return False
    if reason := co_compute_obstacle(setup):
        log.warning("--co-compute auto has no effect: %s", reason)
        return False
    return setup.capacity < setup.catalog.experts


def co_compute_obstacle(setup: ModelSetup) -> str:
    """Return the reason why CPU and GPU cannot share missing experts.

    "" where they can.
    """
    if not (setup.cuda or setup.fake):
        return "without a GPU the CPU computes everything"
    if setup.host_capacity < len(setup.devices):
        return "host memory has no room for experts: give a larger --host-memory"
    return ""
