"""Greenroom: run Mixture-of-Experts language models that are larger than memory.

    model, tokenizer = greenroom.load("demo", cache="25%")

The functions are imported when they are first used, so that importing the package is quick.
Import greenroom before torch: it sets environment variables for OpenMP's threads, which are read
only once, when torch is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from greenroom.environment import check_platform, limit_spinning, request_large_pages

if TYPE_CHECKING:
    from greenroom.errors import GreenroomError as GreenroomError
    from greenroom.hf.check.quality import quality as quality
    from greenroom.hf.check.verify import verify as verify
    from greenroom.hf.load.load import load as load
    from greenroom.hf.pack.packing import pack as pack
    from greenroom.sim.simulation import simulate as simulate

    __version__: str

_WHERE = {
    "load": "greenroom.hf.load.load",
    "pack": "greenroom.hf.pack.packing",
    "quality": "greenroom.hf.check.quality",
    "verify": "greenroom.hf.check.verify",
    "simulate": "greenroom.sim.simulation",
    "GreenroomError": "greenroom.errors",
}
__all__ = ["GreenroomError", "load", "pack", "quality", "simulate", "verify"]

limit_spinning()
request_large_pages()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _installed_version()
    if name not in _WHERE:
        raise AttributeError(f"module 'greenroom' has no attribute {name!r}")
    if name != "GreenroomError":
        check_platform()
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def _installed_version() -> str:
    """Return the version that was installed; of sources on PYTHONPATH alone it is 0+unknown."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("greenroom")
    except PackageNotFoundError:
        return "0+unknown"
