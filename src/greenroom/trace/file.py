"""Loading and saving of traces, the records of which experts each token used.

docs/trace-format.md describes Greenroom's trace format, a safetensors file.
"""

from __future__ import annotations

import os
from pathlib import Path

from greenroom.errors import TraceError
from greenroom.trace import container, journal, npz, segments
from greenroom.trace.tensors import to_tensors, to_trace
from greenroom.trace.trace import Trace


def load(path: str | Path) -> Trace:
    """Read a trace of expert routing from a file.

    The file may be in Greenroom's trace format, the journal of an unfinished recording, or a NumPy
    npz recording. Greenroom's trace format is mapped into memory, so the arrays are read-only.
    Raises TraceError if the file is missing, damaged, of another version, or has impossible values.
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
        also = f"; an unfinished recording is in {grows}" if grows.is_file() else ""
        raise TraceError(f"{path}: the trace cannot be read: {reason}{also}") from error
    except TraceError as error:  # from checks of the trace, which do not know the file's name
        message = str(error)
        named = message if message.startswith(str(path)) else f"{path}: {message}"
        raise TraceError(named) from error


def save(trace: Trace, path: str | Path) -> None:
    """Write a trace of expert routing to a file in Greenroom's trace format, atomically.

    Raises OutputError if the file cannot be written.
    """
    container.write(Path(path), *to_tensors(trace))
