"""Check the installed transformers against the range that Greenroom is written for.

Greenroom calls functions of transformers that are not public, so other versions may fail anywhere.
`greenroom.hf` checks the version once, before any of its modules is imported.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from greenroom.errors import VersionError

FLOOR, CEILING = (5, 23), (5, 24)  # from FLOOR on and below CEILING, as in pyproject.toml


def check_transformers() -> None:
    """Raise VersionError unless a supported version of transformers is installed."""
    requirement = f"transformers>={_text(FLOOR)},<{_text(CEILING)}"
    install = f"pip install '{requirement}'"
    try:
        installed = version("transformers")
    except PackageNotFoundError as error:
        raise VersionError(f"transformers is not installed: run {install}") from error
    if not FLOOR <= tuple(int(part) for part in installed.split(".")[:2]) < CEILING:
        raise VersionError(
            f"transformers {installed} is installed, but Greenroom needs {requirement}:"
            f" run {install}"
        )


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
