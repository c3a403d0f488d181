"""Look up expert kernels by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec

from greenroom.errors import UnknownName, UsageError
from greenroom.runtime.kernels.base import Kernel
from greenroom.runtime.kernels.cpu import CpuKernel
from greenroom.runtime.kernels.eager import EagerKernel
from greenroom.runtime.kernels.layer import LayerExperts

KERNELS: dict[str, Callable[[], Kernel]] = {
    "eager": EagerKernel,
    "native": CpuKernel,
    "precise": partial(CpuKernel, "precise"),
    "rounded": partial(CpuKernel, "rounded"),
}
GPU_KERNEL = "triton"  # imported when it is used: only GPUs need its library


def describe_kernel(chosen: Kernel, layers: Iterable[LayerExperts], fallback: str = "") -> str:
    """Return an expert kernel's name, and why the eager kernel computes some layers.

    fallback: why the eager kernel was chosen for all layers, if the user did not
    """
    if fallback:
        return f"{chosen.name} ({fallback})"
    reasons = (
        {layer.fallback_reason for layer in layers} - {""}
        if isinstance(chosen, CpuKernel)
        else set()
    )
    return f"{chosen.name}; eager for {', '.join(sorted(reasons))}" if reasons else chosen.name


def make_kernel(name: str) -> Kernel:
    """Make the expert kernel that a name selects: eager, native, precise, rounded or triton.

    Raises UnknownName, whose message lists the names, and UsageError for triton if Triton is not
    installed.
    """
    if name == GPU_KERNEL:
        if find_spec("triton") is None:
            raise UsageError(
                "--kernels triton needs the package triton: pip install 'greenroom[gpu]'"
            )
        from greenroom.runtime.kernels.triton import TritonKernel

        return TritonKernel()
    if name not in KERNELS:
        raise UnknownName("kernel", name, [*KERNELS, GPU_KERNEL])
    return KERNELS[name]()
