"""Simulated approximation of missing experts: sizes of low-precision copies, tail weights."""

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
    """Bytes of the experts' low-precision copies, which are computed instead of missing experts.

    low:    a copy's share of an expert's bytes
    share:  the share of the cache's memory for copies
    nested: the copies are a part of the experts' bytes
    """

    low: float
    share: float
    nested: bool = False

    @classmethod
    def of(cls, at: Approximation, nested: bool = False, low: float | None = None) -> CopySizes:
        """Compute the sizes of copies of a precision.

        Without `low`, experts have 16 bits, or int8 where nested.

        There are no copies where no miss is served from one."""
        if not at.low:
            return cls(0.0, at.share)
        if low is None:
            low = NESTED if nested else BITS[at.precision] / STORED
        return cls(low, at.share, nested)

    def pieces(
        self, trace: Trace, expert_bytes: int, capacity: int, chunk_bytes: int
    ) -> Pieces | None:
        """Build the cacheable pieces: experts and low-precision copies; None without copies."""
        if not self.low:
            return None
        copies_count = int(self.share * capacity / self.low)
        copies_count = min(int(trace.offsets[-1]), max(trace.top_k, copies_count))
        nested = self.nested
        copies = Copies.of(expert_bytes, self.low, trace.layers, copies_count, nested=nested)
        kinds = (copies.exact, copies.low, copies.remainder)[: 3 if nested else 2]
        sizes = np.repeat(kinds, trace.experts_per_layer, axis=1).reshape(-1)
        chunks = [-(-n // chunk_bytes) for n in sizes.tolist()]
        return Pieces.with_copies(trace.offsets.tolist(), copies, chunks)


def check_weights(trace: Trace) -> None:
    """Raise UsageError where a trace has no gate weights."""
    if trace.weights is None:
        raise UsageError(
            "misses are judged by gate weights, which this trace does not have: record it with"
            " `greenroom trace record --weights`"
        )


def tail_weights_of(trace: Trace, begin: int, end: int, layer: int) -> NDArray[np.float32]:
    """Compute the tail weight of each expert that a range of tokens uses.

    The tokens are begin .. end; the ids ascend.
    """
    assert trace.weights is not None
    chosen = trace.experts[begin:end, layer].astype(np.int64)
    return expert_tail_weights(chosen, trace.weights[begin:end, layer], np.unique(chosen))
