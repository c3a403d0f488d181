"""Where a model's experts are computed: on which devices, behind which links, by which kernels."""

from __future__ import annotations

import logging
from importlib.util import find_spec

from greenroom.errors import UsageError
from greenroom.hf.memory.setup import ModelSetup
from greenroom.runtime.cuda.engine import Cuda, Engine
from greenroom.runtime.kernels.table import ON_GPUS

COMPILED = "numba", "rounded"  # kernels that read dense matrices as they are stored
IN_FLIGHT = 2  # chunks on their way to a GPU at a time: what is queued there cannot be recalled
LINKS = ("disk -> host", "host -> device")

log = logging.getLogger(__name__)


def engine_for(parts: ModelSetup, number: int) -> Engine:
    """One of the GPUs; the first one has the dense parts."""
    return Cuda(parts.devices[number])


def engines_for(parts: ModelSetup) -> list[Engine]:
    """Every GPU; none where slots are in host memory."""
    return [engine_for(parts, n) for n in range(len(parts.devices))] if parts.cuda else []


def lanes_of(parts: ModelSetup) -> tuple[int, ...]:
    """Transfers at a time of each link."""
    if parts.cuda:
        return parts.readers, IN_FLIGHT
    return (parts.readers, 1) if parts.fake else (parts.readers,)


def links_of(parts: ModelSetup) -> tuple[str, ...]:
    """What the links are called; the last one there is for each of several devices."""
    chain = LINKS[: len(lanes_of(parts))]
    if len(parts.devices) == 1:
        return chain
    name = "cuda" if parts.cuda else "fake"
    return (*chain[:-1], *(f"host -> {name}:{number}" for number in parts.devices))


def kernels_of(parts: ModelSetup) -> str:
    """What computes the experts where they are; UsageError where it cannot."""
    if parts.kernels == "auto":
        if not parts.cuda:
            return "numba"
        if find_spec("triton") is not None:
            return ON_GPUS
        log.warning("Triton is not installed (pip install 'greenroom[gpu]'): kernels eager, slower")
        return "eager"
    if parts.cuda and parts.kernels in COMPILED:
        raise UsageError(
            f"--kernels {parts.kernels} computes on a CPU: with --device cuda take triton or eager"
        )
    return parts.kernels


def host_computes(parts: ModelSetup) -> bool:
    """Does the host's processor compute too? It is said where it was asked for and cannot."""
    if not parts.config.uses_host():
        return False
    if why := one_processor(parts):
        log.warning("--co-compute auto: %s", why)
        return False
    return parts.capacity < parts.catalog.experts


def one_processor(parts: ModelSetup) -> str:
    """Why misses cannot be shared out between two processors here; nothing where they can."""
    if not (parts.cuda or parts.fake):
        return "there is one processor here, and nothing to choose"
    if parts.host_capacity < len(parts.devices):
        return (
            "host memory has no room for experts, so there is nothing to compute there;"
            " --host-memory says how much it may take"
        )
    return ""
