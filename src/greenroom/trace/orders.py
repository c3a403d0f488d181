"""Orders in which a simulated cache serves a trace's requests for experts.

A step is a set of experts that the cache must serve at the same time; the orders differ in what a
step is. docs/design.md defines the orders.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.config import ORDERS
from greenroom.core.stream import Stream
from greenroom.errors import UnknownName
from greenroom.trace.trace import Trace, starts_of

StepCounts = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]
_BINS = 1 << 18  # passes x experts counted at a time: these bins fit in a core's cache


def stream(trace: Trace, order: str = "natural", limit: int | None = None) -> Stream:
    """Convert a trace to a stream of requests for experts, in a given order.

    natural: for each token, for each layer, a step with the token's experts in stored order
    rounds:  for each token, for each rank, for each layer, a step with one expert (layered paging,
             section 5.1)
    runtime: for each forward pass, for each layer, a step with the distinct experts of the pass's
             tokens, ascending; `rows` counts the tokens of each expert, and their gate weights are
             summed

    `limit` takes only the trace's first tokens. Raises UnknownName for another order.
    """
    if order not in ORDERS:
        raise UnknownName("order", order, ORDERS)
    if limit is not None:
        trace = trace.head(limit)
    return _runtime(trace) if order == "runtime" else _by_token(trace, order == "rounds")


def _by_token(trace: Trace, in_rounds: bool) -> Stream:
    """Convert a trace token by token: a step for each layer, or, in rounds, for each expert."""
    layer, size = np.arange(trace.layers, dtype=np.int32), trace.top_k
    pieces = trace.experts + trace.offsets[:-1, None].astype(np.int32)
    weights = np.empty((0, 0, 0)) if trace.weights is None else trace.weights
    if in_rounds:
        layer, size = np.tile(layer, size), 1
        pieces, weights = pieces.transpose(0, 2, 1), weights.transpose(0, 2, 1)
    tokens, steps = trace.tokens, layer.size
    lengths = np.diff(trace.pass_starts)
    request = np.repeat(trace.pass_requests.astype(np.int32), lengths)
    prefill = np.repeat(trace.pass_prefill, lengths)
    return Stream(
        pieces=pieces.ravel(),
        starts=np.arange(0, pieces.size + 1, size, dtype=np.int64),
        now=np.arange(tokens * steps, dtype=np.int64),
        layer=np.tile(layer, tokens),
        token=np.repeat(np.arange(tokens, dtype=np.int64), steps),
        request=np.repeat(request, steps),
        prefill=np.repeat(prefill, steps),
        rows=np.empty(0, np.int32),
        weights=weights.astype(np.float32).ravel(),
    )


def _runtime(trace: Trace) -> Stream:
    passes, layers = trace.passes, trace.layers
    size = max(1, _BINS // int(trace.offsets[-1]))  # passes counted at a time
    parts = [_count(trace, at, min(at + size, passes)) for at in range(0, passes, size)]
    pieces, counts, rows, weights = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Stream(
        pieces=pieces,
        starts=starts_of(counts),
        now=np.arange(passes * layers, dtype=np.int64),
        layer=np.tile(np.arange(layers, dtype=np.int32), passes),
        token=np.repeat(np.arange(passes, dtype=np.int64), layers),
        request=np.repeat(trace.pass_requests.astype(np.int32), layers),
        prefill=np.repeat(trace.pass_prefill, layers),
        rows=rows,
        weights=weights,
    )


def _count(trace: Trace, first: int, last: int) -> StepCounts:
    """Count the tokens that use each expert in each pass of a range.

    Returns the arrays of a stream: the experts' dense ids, the number of experts in each step, the
    tokens of each expert, and their summed gate weights (empty if the trace has no weights).
    """
    total, layers = int(trace.offsets[-1]), trace.layers
    begin, end = trace.pass_starts[first], trace.pass_starts[last]
    if end - begin == last - first:
        return _sort_tokens(trace, begin, end)
    lengths = np.diff(trace.pass_starts[first : last + 1])
    base = np.repeat(np.arange(last - first, dtype=np.int64) * total, lengths)
    bins = trace.experts[begin:end] + (base[:, None] + trace.offsets[:-1])[..., None]
    counts = np.bincount(bins.ravel(), minlength=(last - first) * total)
    used = np.flatnonzero(counts)
    pieces = used % total
    layer_of = np.repeat(np.arange(layers), trace.experts_per_layer)
    steps = np.bincount(
        used // total * layers + layer_of[pieces], minlength=(last - first) * layers
    )
    weights = np.empty(0, np.float32)
    if trace.weights is not None:
        gate_weights = trace.weights[begin:end].ravel()
        weights = np.bincount(bins.ravel(), gate_weights, counts.size)[used].astype(np.float32)
    return pieces.astype(np.int32), steps, counts[used].astype(np.int32), weights


def _sort_tokens(trace: Trace, begin: int, end: int) -> StepCounts:
    """Sort the experts within each step, for passes of one token each.

    The result is that of `_count`, which is slower.
    """
    experts = trace.experts[begin:end]
    order = np.argsort(experts, axis=2)
    dense = np.take_along_axis(experts, order, 2) + trace.offsets[:-1, None].astype(np.int32)
    weights = np.empty(0, np.float32)
    if trace.weights is not None:
        weights = np.take_along_axis(trace.weights[begin:end], order, 2).astype(np.float32).ravel()
    steps = np.full(len(experts) * trace.layers, trace.top_k)
    return dense.ravel(), steps, np.ones(dense.size, np.int32), weights
