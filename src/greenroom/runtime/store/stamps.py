"""Detection of changes to a checkpoint's files while a model uses them.

A `Stamp` is compared, never interpreted. An open file that is overwritten or truncated gets another
size or modification time. An open file whose path is replaced by another file (a rename) keeps its
bytes and its stamp, and can still be read.
"""

from __future__ import annotations

import os

from greenroom.errors import CheckpointChanged, CheckpointError

Stamp = tuple[int, ...]  # device, inode, size and modification time


def stamp_of(file: str | int) -> Stamp:
    """Return a file's stamp, by which a later change is detected.

    The argument is a path (links are followed) or an open file. OSError.
    """
    stat = os.stat(file)
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


class Stamps:
    """Stamps of a checkpoint's files, by which later changes are detected."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        """Record the stamps of a checkpoint's files.

        CheckpointError if a file cannot be found.
        """
        self._of = {path: _stamp(path) for path in paths}

    def check(self, when: str) -> None:
        """Raise CheckpointChanged if a file of the checkpoint was changed or replaced.

        `when` completes the message: "since the model was loaded".
        """
        for path, before in self._of.items():
            if _stamp(path) != before:
                raise CheckpointChanged(f"{path} changed {when}: load the model again")


def _stamp(path: str) -> Stamp:
    try:
        return stamp_of(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
