"""Substitute experts: resident experts that are computed in place of missing ones.

The substitute is the resident expert most often chosen with the missing one.

BuddyMoE (Wang et al., 2025, section 3) assumes that experts which tokens choose together are alike,
and replaces a miss by a cached *buddy*. The paper profiles a text beforehand; here choices are
counted while decoding, so nothing need be prepared. The paper's gates by entropy and margin are
replaced by the tail weight (see `core.gates`): only experts of a low tail weight are replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from greenroom.core.pieces import Ints


class Substitutes:
    """Counts of how often two experts of a layer were chosen together.

    In one step; ids are dense.
    """

    def __init__(self, offsets: Sequence[int]) -> None:
        self._offsets = tuple(offsets)
        self.counts: list[NDArray[np.int32]] = [  # of each layer [E, E]
            np.zeros((b - a, b - a), np.int32) for a, b in pairwise(offsets)
        ]

    def count(self, layer: int, experts: Ints) -> None:
        """Count the experts that a decode step has chosen in a layer."""
        local = experts - self._offsets[layer]
        self.counts[layer][np.ix_(local, local)] += 1

    def find(self, layer: int, expert: int, allowed: NDArray[np.bool_]) -> int:
        """Find the substitute most often chosen together with an expert of a layer.

        Only `allowed` [E] experts are considered.

        -1 where none ever was; the smallest id of several with the same count.
        """
        first = self._offsets[layer]
        counts = np.where(allowed, self.counts[layer][expert - first], 0)
        best = int(counts.argmax())
        return first + best if counts[best] > 0 else -1
