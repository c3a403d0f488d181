"""A line that describes the contents of a routing trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from greenroom.trace import Trace


def contents(trace: Trace) -> str:
    """Describe a routing trace in one line: tokens, requests, passes, layers and experts."""
    most = sorted(set(trace.experts_per_layer.tolist()))
    experts = str(most[0]) if len(most) == 1 else f"{most[0]} to {most[-1]}"
    return (
        f"{trace.tokens} tokens of {trace.requests} requests in {trace.passes} passes"
        f" ({int(trace.pass_prefill.sum())} prefill), {trace.layers} layers x {experts} experts,"
        f" top-{trace.top_k}"
    )
