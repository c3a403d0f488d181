"""Loading of a trace that must be of a given model."""

from __future__ import annotations

from pathlib import Path

from greenroom.errors import UsageError
from greenroom.trace import Trace, load


def load_trace_of(path: Path, fingerprint: str, command: str) -> Trace:
    """Load a trace that was recorded with the model of a fingerprint.

    UsageError for another model's trace; it names the command that records one of this model.
    """
    trace = load(path)
    recorded = trace.meta.get("fingerprint")
    if recorded != fingerprint:
        other = "does not name its model" if recorded is None else "is of another model"
        raise UsageError(f"{path}: the trace {other}: make one with `{command}`")
    return trace
