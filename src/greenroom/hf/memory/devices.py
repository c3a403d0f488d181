"""Choose the devices that compute a model's experts, their transfer links and kernels."""

from __future__ import annotations

import logging
from importlib.util import find_spec

from greenroom.errors import UsageError
from greenroom.hf.memory.setup import ModelSetup
from greenroom.runtime.cuda.engine import Cuda, Engine
from greenroom.runtime.kernels.native.library import library, missing_reason
from greenroom.runtime.kernels.table import GPU_KERNEL

COMPILED = "native", "precise", "rounded"  # kernels that read dense matrices as they are stored
IN_FLIGHT = 2  # chunks that are copied to a GPU at a time: queued copies cannot be cancelled
LINKS = ("disk -> host", "host -> device")

log = logging.getLogger(__name__)


def engine_for(setup: ModelSetup, number: int) -> Engine:
    """Open one of a run's GPUs by its index in the run's devices.

    The first GPU has all weights that are not experts.
    """
    return Cuda(setup.devices[number])


def engines_for(setup: ModelSetup) -> list[Engine]:
    """Open all GPUs of a run; the list is empty if expert slots are in host memory."""
    return [engine_for(setup, n) for n in range(len(setup.devices))] if setup.cuda else []


def lanes_of(setup: ModelSetup) -> tuple[int, ...]:
    """Return the number of concurrent transfers of each link: from disk, and to a GPU."""
    if setup.cuda:
        return setup.readers, IN_FLIGHT
    return (setup.readers, 1) if setup.fake else (setup.readers,)


def links_of(setup: ModelSetup) -> tuple[str, ...]:
    """Return the names of a run's transfer links, such as "disk -> host".

    Each of several devices has its own link from the host.
    """
    chain = LINKS[: len(lanes_of(setup))]
    if len(setup.devices) == 1:
        return chain
    name = "cuda" if setup.cuda else "fake"
    return (*chain[:-1], *(f"host -> {name}:{number}" for number in setup.devices))


def kernels_of(setup: ModelSetup) -> str:
    """Return the name of the kernels that compute experts, for `--kernels` and the device.

    Raises UsageError if the device cannot run the kernels that the user named, or if these are
    compiled kernels that this installation lacks.
    """
    if setup.kernels == "auto":
        if not setup.cuda:
            return "eager" if missing_reason() else "native"
        if find_spec("triton") is not None:
            return GPU_KERNEL
        log.warning(
            "Triton is not installed, so the slower eager kernels compute experts on the GPU:"
            " run pip install 'greenroom[gpu]'"
        )
        return "eager"
    if setup.cuda and setup.kernels in COMPILED:
        raise UsageError(
            f"--kernels {setup.kernels} runs on a CPU only: with --device cuda use triton or eager"
        )
    if setup.kernels in COMPILED:
        library()
    return setup.kernels


def kernel_fallback(setup: ModelSetup) -> str:
    """Return why `--kernels auto` means the eager kernel on this CPU; "" if it does not."""
    return missing_reason() if setup.kernels == "auto" and not setup.cuda else ""


def host_computes(setup: ModelSetup) -> bool:
    """Return whether the CPU computes some of the experts missing in GPU memory.

    Logs a warning if `--co-compute` asks for that and this machine cannot do it.
    """
    if not setup.config.uses_host():
        return False
    if reason := co_compute_obstacle(setup):
        log.warning("--co-compute auto has no effect: %s", reason)
        return False
    if setup.cuda and (reason := missing_reason()):
        log.warning("%s: the CPU computes its share of experts slowly, by torch's products", reason)
    return setup.capacity < setup.catalog.experts


def co_compute_obstacle(setup: ModelSetup) -> str:
    """Return why CPU and GPU cannot share the experts missing on the GPU; "" if they can."""
    if not (setup.cuda or setup.fake):
        return "without a GPU the CPU computes everything"
    if setup.host_capacity < len(setup.devices):
        return "host memory has no room for experts: give a larger --host-memory"
    return ""
