"""The trace that a command writes: its option, its check, and what is said of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from greenroom.errors import UsageError

if TYPE_CHECKING:
    from greenroom.trace import Trace


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--out", metavar="OUT", required=True, type=Path, help="the trace to write"
    )


def check_out(path: Path) -> None:
    """Before anything is computed: UsageError where the trace could not be written."""
    if path.is_dir():
        raise UsageError(f"{path}: is a folder; name a file for the trace")
    if not path.resolve().parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}")


def contents(trace: Trace) -> str:
    """One line."""
    most = sorted(set(trace.experts_per_layer.tolist()))
    experts = str(most[0]) if len(most) == 1 else f"{most[0]} to {most[-1]}"
    return (
        f"{trace.tokens} tokens of {trace.requests} requests in {trace.passes} passes"
        f" ({int(trace.pass_prefill.sum())} prefill), {trace.layers} layers x {experts} experts,"
        f" top-{trace.top_k}"
    )
