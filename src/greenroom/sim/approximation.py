"""Approximation of missing experts in a simulation: sizes of copies, importance of experts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from greenroom.core.config.base import Approximation
from greenroom.core.gates import expert_tail_weights
from greenroom.core.pieces import Copies, Pieces
from greenroom.errors import UsageError
from greenroom.trace import Trace

BITS = {"int4": 4.5, "int8": 8.25}  # of a weight, its share of scales included: a pack's encodings
STORED = 16.0  # bits of a stored weight, unless the size of copies is given
NESTED = 4.25 / 8.25  # an int4 copy's share of an int8 expert that contains it


@dataclass(frozen=True, slots=True)
class CopySizes:
    """Sizes of low-precision copies, which are computed in place of missing experts.

    low:    bytes of a copy as a share of an expert's bytes; 0 if there are no copies
    share:  share of the cache's memory that holds copies
    nested: whether the bytes of a copy are part of its expert's bytes
    """

    low: float
    share: float
    nested: bool = False

    @classmethod
    def of(cls, at: Approximation, nested: bool = False, low: float | None = None) -> CopySizes:
        """Compute the sizes of copies from the precision that a simulation asks for.

        `low` is the size of a copy as a share of its expert. By default it follows from the
        precision, for experts of 16 bits per weight, or of int8 if `nested`. If no threshold lets a
        miss use a copy, there are no copies.
        """
        if not at.low:
            return cls(0.0, at.share)
        if low is None:
            low = NESTED if nested else BITS[at.precision] / STORED
        return cls(low, at.share, nested)

    def pieces(
        self, trace: Trace, expert_bytes: int, capacity: int, chunk_bytes: int, devices: int = 1
    ) -> Pieces | None:
        """List what can be cached: every expert and its low-precision copy; None without copies.

        `capacity` is the cache's memory as a number of experts, and `chunk_bytes` is the largest
        transfer.
        """
        if not self.low:
            return None
        copies_count = int(self.share * capacity / self.low)
        copies_count = min(int(trace.offsets[-1]), max(trace.top_k, copies_count))
        nested = self.nested
        copies = Copies.of(expert_bytes, self.low, trace.layers, copies_count, nested=nested)
        kinds = (copies.exact, copies.low, copies.remainder)[: 3 if nested else 2]
        sizes = np.repeat(kinds, trace.experts_per_layer, axis=1).reshape(-1)
        chunks = [-(-n // chunk_bytes) for n in sizes.tolist()]
        return Pieces.with_copies(trace.offsets.tolist(), copies, chunks, devices)


def check_weights(trace: Trace) -> None:
    """Raise UsageError if a trace has no gate weights, which approximation needs."""
    if trace.weights is None:
        raise UsageError(
            "the trace has no gate weights, and --low-below, --skip-below and --substitute-below"
            " need them: record the trace again with `greenroom trace record --weights`"
        )


def tail_weights_of(trace: Trace, begin: int, end: int, layer: int) -> NDArray[np.float32]:
    """Compute how much each expert matters to the tokens of a trace that use it.

    The tokens are `begin` to `end - 1`. Returns the tail weight (see core/gates.py) of each
    distinct expert that they use in the layer, in ascending order of expert ids.
    """
    assert trace.weights is not None
    chosen = trace.experts[begin:end, layer].astype(np.int64)
    return expert_tail_weights(chosen, trace.weights[begin:end, layer], np.unique(chosen))
