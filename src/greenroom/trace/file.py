"""Traces on disk: our own file (see docs/trace-format.md), and the npz of published recordings."""

from __future__ import annotations

import os
from pathlib import Path

from greenroom.errors import TraceError
from greenroom.trace import container, journal, npz, segments
from greenroom.trace.tensors import to_tensors, to_trace
from greenroom.trace.trace import Trace


def load(path: str | Path) -> Trace:
    """Read a trace: our own format, a journal of a recording that did not end, or an npz.

    Arrays of our own format stay in the file until they are used. TraceError, in one line, where
    the file is missing, damaged, of another version, or holds what cannot be.
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
        also = f"; a recording that did not end is at {grows}" if grows.is_file() else ""
        raise TraceError(f"{path}: cannot be read: {reason}{also}") from error
    except TraceError as error:  # of the trace's own checks, which do not know the file
        said = str(error)
        raise TraceError(said if said.startswith(str(path)) else f"{path}: {said}") from error


def save(trace: Trace, path: str | Path) -> None:
    """Write a trace: beside, then renamed, so that it is there whole or not at all."""
    container.write(Path(path), *to_tensors(trace))
