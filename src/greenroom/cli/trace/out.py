"""The trace that a command reads, and a line that describes it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from greenroom.cli.options.parser import Parser

if TYPE_CHECKING:
    from greenroom.trace import Trace


def add_trace(parser: Parser) -> None:
    """Add the argument that names a trace, of any form that can be read."""
    parser.add_argument(
        "trace",
        metavar="TRACE",
        type=Path,
        help="a trace, the journal of an unfinished recording, or an npz file",
    )


def contents(trace: Trace) -> str:
    """Describe a routing trace in one line: tokens, requests, passes, layers and experts."""
    most = sorted(set(trace.experts_per_layer.tolist()))
    experts = str(most[0]) if len(most) == 1 else f"{most[0]} to {most[-1]}"
    return (
        f"{trace.tokens} tokens of {trace.requests} requests in {trace.passes} passes"
        f" ({int(trace.pass_prefill.sum())} prefill), {trace.layers} layers x {experts} experts,"
        f" top-{trace.top_k}"
    )
