"""Notice that a checkpoint's file was changed while it is served.

A `Stamp` is compared, never interpreted. An open file that is overwritten or cut short gets another
size or time of modification; an open file whose path was given to another file (a rename over it)
keeps its bytes and its stamp, and reading it stays right.
"""

from __future__ import annotations

import os

from greenroom.errors import CheckpointChanged, CheckpointError

Stamp = tuple[int, ...]  # what says that a file is the one that it was, unchanged


def stamp_of(file: str | int) -> Stamp:
    """The stamp of a path (links are followed) or of an open file. OSError."""
    found = os.stat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class Stamps:
    """The stamps of a checkpoint's paths, to be compared later."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        """CheckpointError where a file is not there."""
        self._of = {path: _stamp(path) for path in paths}

    def check(self, when: str) -> None:
        """Raise CheckpointChanged where a path is another file now, or a changed one; `when` says
        since what."""
        for path, before in self._of.items():
            if _stamp(path) != before:
                raise CheckpointChanged(f"{path} changed {when}: load the model again")


def _stamp(path: str) -> Stamp:
    try:
        return stamp_of(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
