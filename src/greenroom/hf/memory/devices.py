"""Where a model's experts are computed: on which devices, behind which links, by which kernels."""

from __future__ import annotations

import logging
from importlib.util import find_spec

from greenroom.errors import UsageError
from greenroom.hf.memory.setup import ModelSetup
from greenroom.runtime.cuda.engine import Cuda, Engine
from greenroom.runtime.kernels.table import GPU_KERNEL

COMPILED = "numba", "rounded"  # kernels that read dense matrices as they are stored
IN_FLIGHT = 2  # chunks on their way to a GPU at a time: what is queued there cannot be recalled
LINKS = ("disk -> host", "host -> device")

log = logging.getLogger(__name__)


def engine_for(setup: ModelSetup, number: int) -> Engine:
    """One of the GPUs; the first one has the dense parts."""
    return Cuda(setup.devices[number])


def engines_for(setup: ModelSetup) -> list[Engine]:
    """Every GPU; none where slots are in host memory."""
    return [engine_for(setup, n) for n in range(len(setup.devices))] if setup.cuda else []


def lanes_of(setup: ModelSetup) -> tuple[int, ...]:
    """Transfers at a time of each link."""
    if setup.cuda:
        return setup.readers, IN_FLIGHT
    return (setup.readers, 1) if setup.fake else (setup.readers,)


def links_of(setup: ModelSetup) -> tuple[str, ...]:
    """What the links are called; the last one there is for each of several devices."""
    chain = LINKS[: len(lanes_of(setup))]
    if len(setup.devices) == 1:
        return chain
    name = "cuda" if setup.cuda else "fake"
    return (*chain[:-1], *(f"host -> {name}:{number}" for number in setup.devices))


def kernels_of(setup: ModelSetup) -> str:
    """What computes the experts where they are; UsageError where it cannot."""
    if setup.kernels == "auto":
        if not setup.cuda:
            return "numba"
        if find_spec("triton") is not None:
            return GPU_KERNEL
        log.warning("Triton is not installed (pip install 'greenroom[gpu]'): kernels eager, slower")
        return "eager"
    if setup.cuda and setup.kernels in COMPILED:
        raise UsageError(
            f"--kernels {setup.kernels} computes on a CPU: with --device cuda take triton or eager"
        )
    return setup.kernels


def host_computes(setup: ModelSetup) -> bool:
    """Does the host's processor compute too? It is said where it was asked for and cannot."""
    if not setup.config.uses_host():
        return False
    if why := co_compute_obstacle(setup):
        log.warning("--co-compute auto: %s", why)
        return False
    return setup.capacity < setup.catalog.experts


def co_compute_obstacle(setup: ModelSetup) -> str:
    """Why misses cannot be shared out between two processors here; nothing where they can."""
    if not (setup.cuda or setup.fake):
        return "there is one processor here, and nothing to choose"
    if setup.host_capacity < len(setup.devices):
        return (
            "host memory has no room for experts, so there is nothing to compute there;"
            " --host-memory says how much it may take"
        )
    return ""
