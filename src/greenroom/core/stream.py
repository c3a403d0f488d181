"""Requests in the order in which a cache sees them: what a trace becomes before it is replayed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Stream(NamedTuple):
    """N requests in S steps; a step is served as one, its pieces are distinct and of one layer.

    Orders (they differ in what a step is): `runtime`, one step a pass and layer, ids ascending;
    `natural`, one step a token and layer, experts as stored; `rounds`, one step a request, for
    each token, each rank, each layer.
    """

    pieces: NDArray[np.int32]  # [N] dense ids, offsets[layer] + expert
    starts: NDArray[np.int64]  # [S + 1] step s asks for pieces[starts[s]:starts[s + 1]]
    now: NDArray[
        np.int64
    ]  # [S] logical time: pass or token * layers + layer; request index in rounds
    layer: NDArray[np.int32]  # [S]
    token: NDArray[np.int64]  # [S] the token (natural, rounds) or the pass (runtime)
    request: NDArray[np.int32]  # [S] the prompt-and-answer
    prefill: NDArray[np.bool_]  # [S]
    rows: NDArray[np.int32]  # [N] tokens of the step that chose the piece; empty: 1 each
    weights: NDArray[np.float32]  # [N] gate weight, summed over those tokens; empty: not known
