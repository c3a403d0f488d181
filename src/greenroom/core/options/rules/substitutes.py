"""Substitute experts: resident experts that are computed in place of missing ones.

The substitute is the resident expert that was most often chosen together with the missing one.

BuddyMoE (Wang et al., 2025, section 3) assumes that experts which tokens choose together are alike,
and replaces a miss by a cached *buddy*. The paper profiles a text beforehand; Greenroom counts
choices while decoding, without preparation. The paper decides by entropy and margin of the gate
weights; Greenroom replaces only experts of a low tail weight (see `core.gates`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from greenroom.core.pieces import Ints


class Substitutes:
    """Counts of how often two experts of a layer were chosen in the same pass.

    counts: for each layer with E experts, the counts of all pairs, [E, E]
    """

    def __init__(self, offsets: Sequence[int]) -> None:
        self._offsets = tuple(offsets)
        self.counts: list[NDArray[np.int32]] = [  # of each layer [E, E]
            np.zeros((b - a, b - a), np.int32) for a, b in pairwise(offsets)
        ]

    def count(self, layer: int, experts: Ints) -> None:
        """Count the experts that a layer's router has chosen in a decode pass.

        `experts` are dense ids (layer offset + expert number).
        """
        local = experts - self._offsets[layer]
        self.counts[layer][np.ix_(local, local)] += 1

    def find(self, layer: int, expert: int, allowed: NDArray[np.bool_]) -> int:
        """Find the substitute most often chosen together with an expert of a layer.

        expert:  the dense id of the missing expert
        allowed: flags of the layer's experts that may be its substitute

        Returns a dense id; -1 if no allowed expert was ever chosen with `expert`. Of several
        experts with the same count, the one with the smallest id is returned.
        """
        first = self._offsets[layer]
        counts = np.where(allowed, self.counts[layer][expert - first], 0)
        best = int(counts.argmax())
        return first + best if counts[best] > 0 else -1
