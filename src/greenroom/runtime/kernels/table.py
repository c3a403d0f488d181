"""The expert kernels by name."""

from __future__ import annotations

from greenroom.errors import UnknownName
from greenroom.runtime.kernels.base import Kernel
from greenroom.runtime.kernels.eager import Eager
from greenroom.runtime.kernels.fused import Fused

KERNELS: dict[str, type[Eager] | type[Fused]] = {"eager": Eager, "numba": Fused}


def kernel(name: str) -> Kernel:
    """The expert kernel of a name; `UnknownName` lists those that exist."""
    if name not in KERNELS:
        raise UnknownName("kernel", name, KERNELS)
    return KERNELS[name]()
