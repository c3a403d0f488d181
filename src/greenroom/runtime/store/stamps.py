"""Detection of changes to a checkpoint's files while a model uses them.

A file's stamp consists of its device, inode, size and modification time. An open file that is
overwritten or truncated gets another stamp. An open file whose path is given to another file by a
rename keeps its bytes and its stamp, and can still be read.
"""

from __future__ import annotations

import os

from greenroom.errors import CheckpointChanged, CheckpointError

Stamp = tuple[int, ...]  # device, inode, size and modification time


def stamp_of(file: str | int) -> Stamp:
    """Return a file's stamp: its device, inode, size and modification time (ns).

    `file` is a path (links are followed) or a file descriptor. Raises OSError if there is no such
    file.
    """
    stat = os.stat(file)
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


class Stamps:
    """The stamps of a checkpoint's files, to detect changes.

    A stamp is a file's device, inode, size and modification time.
    """

    def __init__(self, paths: tuple[str, ...]) -> None:
        """Record the present stamp of each file.

        Raises CheckpointError if a file cannot be found.
        """
        self._of = {path: _stamp(path) for path in paths}

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self._of)

    def check(self, when: str) -> None:
        """Raise CheckpointChanged if a file of the checkpoint was changed or replaced.

        `when` completes the message, as in "since the model was loaded". Raises CheckpointError if
        a file is gone.
        """
        for path, before in self._of.items():
            if _stamp(path) != before:
                raise CheckpointChanged(f"{path} changed {when}: load the model again")


def _stamp(path: str) -> Stamp:
    try:
        return stamp_of(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
