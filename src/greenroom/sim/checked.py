"""Is a stream one that a cache can be asked to serve?"""

from __future__ import annotations

import numpy as np

from greenroom.core.compiled_files import njit
from greenroom.core.pieces import Ints
from greenroom.core.stream import Stream
from greenroom.errors import UsageError


def layers_of(offsets: Ints) -> Ints:
    """The layer of each dense id; `offsets` [layers + 1]."""
    ends = np.asarray(offsets, np.int64)
    counts = ends[1:] - ends[:-1]
    return np.repeat(np.arange(counts.size, dtype=np.int64), counts)


def check_stream(stream: Stream, layer: Ints) -> None:
    """UsageError unless every step asks for distinct experts of its layer, and arrays fit.

    `layer` [P] is the layer of each dense id.
    """
    steps, requests = stream.layer.size, stream.pieces.size
    per_step = (stream.now, stream.token, stream.request, stream.prefill)
    per_request = (stream.rows, stream.weights)
    if (
        stream.starts.size != steps + 1
        or stream.starts[0] != 0
        or stream.starts[-1] != requests
        or any(array.size != steps for array in per_step)
        or any(array.size not in (0, requests) for array in per_request)
    ):
        raise UsageError(f"a stream's arrays do not fit: {steps} steps, {requests} requests")
    wrong = _first_wrong(stream.pieces, stream.starts, stream.layer, layer)
    if wrong < 0:
        return
    step = int(np.searchsorted(stream.starts, wrong, side="right")) - 1
    piece, where = int(stream.pieces[wrong]), f"step {step} (layer {stream.layer[step]})"
    if not 0 <= piece < layer.size:
        raise UsageError(f"{where} asks for expert {piece}, of {layer.size}")
    if layer[piece] != stream.layer[step]:
        raise UsageError(f"{where} asks for expert {piece}, which is of layer {layer[piece]}")
    raise UsageError(f"{where} asks twice for expert {piece}")


@njit(nogil=True, cache=True)
def _first_wrong(pieces: Ints, starts: Ints, step_layer: Ints, layer: Ints) -> int:
    """Index of the first request that cannot be right, or -1."""
    asked_in = np.full(layer.size, -1, np.int64)
    for s in range(starts.size - 1):
        for i in range(starts[s], starts[s + 1]):
            piece = pieces[i]
            if piece < 0 or piece >= layer.size:
                return i
            if layer[piece] != step_layer[s] or asked_in[piece] == s:
                return i
            asked_in[piece] = s
    return -1
