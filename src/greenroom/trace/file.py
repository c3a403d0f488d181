"""Loading and saving traces of routing: our own format, journals and npz files.

Our own format: docs/trace-format.md.
"""

from __future__ import annotations

import os
from pathlib import Path

from greenroom.errors import TraceError
from greenroom.trace import container, journal, npz, segments
from greenroom.trace.tensors import to_tensors, to_trace
from greenroom.trace.trace import Trace


def load(path: str | Path) -> Trace:
    """Read a trace of routing: our own format, an unfinished recording's journal, or npz.

    Arrays of our own format stay in the file until they are used. TraceError, in one line, where
    the file is missing, damaged, of another version, or has impossible contents.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            head = file.read(4)
        if head[:2] == b"PK":
            return npz.read(path)
        if head == segments.MAGIC:
            return journal.read(path)
        return to_trace(path, *container.read(path))
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        grows = journal.journal_path(path)
        also = f"; an unfinished recording is at {grows}" if grows.is_file() else ""
        raise TraceError(f"{path}: cannot be read: {reason}{also}") from error
    except TraceError as error:  # from checks of the trace, which do not know the file's name
        message = str(error)
        named = message if message.startswith(str(path)) else f"{path}: {message}"
        raise TraceError(named) from error


def save(trace: Trace, path: str | Path) -> None:
    """Write a trace of routing atomically: to a draft file that is renamed at the end."""
    container.write(Path(path), *to_tensors(trace))
