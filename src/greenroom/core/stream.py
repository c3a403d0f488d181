"""Streams of expert requests: a routing trace in the order a cache sees it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Stream(NamedTuple):
    """A sequence of expert requests, grouped in steps of one layer each.

    There are N requests in S steps; the pieces of a step are distinct. A step depends on the order
    of the trace's requests: in `runtime`, a step is a pass at a layer, ids ascending; in `natural`,
    a token at a layer, experts as stored; in `rounds`, one request, for each token, each rank, each
    layer.
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
