"""Import of the libraries of the extra `study` when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from greenroom.errors import VersionError


def load_library(module: str, purpose: str) -> Any:
    """Import a module of the extra `study`.

    VersionError, which names the extra and the purpose (such as "tables"), if the module is not
    installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        name = module.partition(".")[0]
        raise VersionError(
            f"{purpose} need the package {name}: pip install 'greenroom[study]'"
        ) from error
