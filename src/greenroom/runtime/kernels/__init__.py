"""How a step's experts are computed from their slots, and faster dense layers for one token."""

from __future__ import annotations

from greenroom.errors import UnknownName
from greenroom.runtime.kernels.accelerate import Accelerated, accelerate
from greenroom.runtime.kernels.base import Kernel, LayerExperts, Recipe, Slots
from greenroom.runtime.kernels.eager import Eager
from greenroom.runtime.kernels.fused import Fused
from greenroom.runtime.kernels.routing import Routing

KERNELS: dict[str, type[Eager] | type[Fused]] = {"eager": Eager, "numba": Fused}


def kernel(name: str) -> Kernel:
    """The expert kernel of a name; `UnknownName` lists those that exist."""
    if name not in KERNELS:
        raise UnknownName("kernel", name, KERNELS)
    return KERNELS[name]()


__all__ = [
    "KERNELS",
    "Accelerated",
    "Kernel",
    "LayerExperts",
    "Recipe",
    "Routing",
    "Slots",
    "accelerate",
    "kernel",
]
