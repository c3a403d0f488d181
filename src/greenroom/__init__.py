"""Greenroom: run Mixture-of-Experts language models that are larger than memory.

    model, tokenizer = greenroom.load("demo", cache="25%")

Names are imported when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from greenroom.hf.load import load as load
    from greenroom.hf.verify import verify as verify

__version__ = "0.1.0"

_WHERE = {
    "load": "greenroom.hf.load",
    "verify": "greenroom.hf.verify",
    "simulate": "greenroom.sim.simulate",
    "GreenroomError": "greenroom.errors",
}
__all__ = ["GreenroomError", "load", "simulate", "verify"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'greenroom' has no attribute {name!r}")
    # Readers and compute share the cores: a thread that spins for work takes one from them. This
    # holds for the OpenMP that torch brings, so it must be said before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
