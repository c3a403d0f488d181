"""What a trace says to the configurator: its decoded tokens, and what was predicted of them."""

from __future__ import annotations

import numpy as np

from greenroom.core.activity import Activity
from greenroom.errors import UnknownName
from greenroom.trace import Trace


def activity_of(trace: Trace, predictions: str | None = None) -> Activity:
    """Count a trace's tokens: those of decode passes, of all passes where it has no other.

    `predictions` names one of the trace's (default: the first; without any nothing is taken as
    predicted). UnknownName lists those that there are.
    """
    if predictions is not None and predictions not in trace.predictions:
        raise UnknownName("predictions", predictions, trace.predictions)
    made = trace.predictions.get(predictions or next(iter(trace.predictions), ""))
    activity = Activity(trace.experts_per_layer.tolist())
    prefill = np.repeat(trace.pass_prefill, np.diff(trace.pass_starts))
    tokens = np.flatnonzero(~prefill) if not prefill.all() else np.arange(trace.tokens)
    for token in tokens.tolist():
        for layer in range(trace.layers):
            expected = None
            if made is not None:
                row = made.experts[token, layer]
                expected = row[row < np.iinfo(row.dtype).max].astype(np.int64)
            activity.token(layer, trace.experts[token, layer].astype(np.int64), expected)
    return activity
