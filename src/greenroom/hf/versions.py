"""Check the installed transformers against the range that Greenroom is written for.

Greenroom calls functions of transformers that are not public, so other versions fail somewhere in
the middle. `greenroom.hf` checks once, before any of its modules is imported.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from greenroom.errors import VersionError

FLOOR, CEILING = (5, 23), (5, 24)  # as pyproject.toml: at least the first, below the second


def check_transformers() -> None:
    """Raise VersionError unless a transformers of the range is installed."""
    wanted = f"transformers>={_text(FLOOR)},<{_text(CEILING)}"
    install = f"pip install '{wanted}'"
    try:
        found = version("transformers")
    except PackageNotFoundError as error:
        raise VersionError(f"transformers is not installed: {install}") from error
    if not FLOOR <= tuple(int(part) for part in found.split(".")[:2]) < CEILING:
        raise VersionError(f"transformers {found} is installed, {wanted} is needed: {install}")


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
