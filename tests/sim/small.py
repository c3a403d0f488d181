"""Small traces for the simulator's tests."""

from __future__ import annotations

import numpy as np

from greenroom.core.stream import Stream
from greenroom.sim.simulate import TraceStep
from greenroom.trace import Trace


def trace(
    requests: list[list[int]],
    *,
    layers: int = 2,
    experts: int = 8,
    top_k: int = 2,
    seed: int = 0,
) -> Trace:
    """Random routing; a request is a list of passes, by their tokens: -5 is a prompt of five."""
    rng = np.random.default_rng(seed)
    passes = [n for request in requests for n in request]
    tokens = int(np.abs(passes).sum())
    scores = rng.random((tokens, layers, experts)) + np.linspace(0, 0.5, experts)
    return Trace(
        experts=np.argsort(-scores, axis=2)[:, :, :top_k].astype(np.uint8),
        experts_per_layer=np.full(layers, experts),
        request_starts=starts([sum(map(abs, request)) for request in requests]),
        pass_starts=starts([abs(n) for n in passes]),
        pass_prefill=np.array([n < 0 for n in passes]),
        labels=("",) * len(requests),
    )


def of(experts: list[list[list[int]]], requests: list[list[int]], most: int = 4) -> Trace:
    """Routing as given, [tokens][layers][top_k]; requests as in `trace`."""
    shape = trace(requests, layers=len(experts[0]), experts=most, top_k=len(experts[0][0]))
    return Trace(
        np.array(experts, np.uint8),
        shape.experts_per_layer,
        shape.request_starts,
        shape.pass_starts,
        shape.pass_prefill,
        shape.labels,
    )


def starts(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def steps(trace: Trace, stream: Stream) -> list[TraceStep]:
    """A stream in runtime order as the event machine takes it."""
    tokens = np.diff(trace.pass_starts)
    found = []
    for s in range(stream.layer.size):
        part = slice(int(stream.starts[s]), int(stream.starts[s + 1]))
        rows = stream.rows[part] if stream.rows.size else None
        number = int(stream.token[s])
        found.append(
            TraceStep(number, int(stream.layer[s]), stream.pieces[part].astype(np.int64), rows,
                      int(tokens[number]))
        )  # fmt: skip
    return found
