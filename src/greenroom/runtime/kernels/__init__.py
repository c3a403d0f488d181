"""How a step's experts are computed from their slots, and faster dense layers for one token.

Names are imported when they are first used: what compiles (`jit`, `ahead`) needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from greenroom.runtime.kernels.base import Kernel as Kernel
    from greenroom.runtime.kernels.base import LayerExperts as LayerExperts
    from greenroom.runtime.kernels.base import Recipe as Recipe
    from greenroom.runtime.kernels.base import Slots as Slots
    from greenroom.runtime.kernels.routing import Routing as Routing
    from greenroom.runtime.kernels.table import KERNELS as KERNELS
    from greenroom.runtime.kernels.table import described as described
    from greenroom.runtime.kernels.table import kernel as kernel

_WHERE = {
    "KERNELS": "table",
    "described": "table",
    "kernel": "table",
    "Kernel": "base",
    "LayerExperts": "base",
    "Recipe": "base",
    "Slots": "base",
    "Routing": "routing",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
