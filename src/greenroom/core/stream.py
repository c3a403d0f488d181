"""Streams of expert requests: a routing trace in the order in which a cache gets it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Stream(NamedTuple):
    """A sequence of expert requests, grouped in steps of one layer each.

    There are N requests in S steps; the experts (or segments) of a step are distinct. What a step
    is depends on the order of the trace's requests: in `runtime`, one pass at one layer, ids
    ascending; in `natural`, one token at one layer, experts in the trace's order; in `rounds`, a
    single request, ordered by token, then rank, then layer.
    """

    pieces: NDArray[np.int32]  # [N] dense ids, offsets[layer] + expert
    starts: NDArray[np.int64]  # [S + 1] step s requests pieces[starts[s]:starts[s + 1]]
    now: NDArray[
        np.int64
    ]  # [S] time: pass or token * layers + layer; in rounds the request's index
    layer: NDArray[np.int32]  # [S]
    token: NDArray[np.int64]  # [S] the token (natural, rounds) or the pass (runtime)
    request: NDArray[np.int32]  # [S] the prompt and its answer
    prefill: NDArray[np.bool_]  # [S]
    rows: NDArray[np.int32]  # [N] tokens of the step that chose the piece; empty: 1 each
    weights: NDArray[np.float32]  # [N] gate weights summed over these tokens; empty: unknown
