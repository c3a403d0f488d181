"""Who stands in for an expert that is not there: the resident one most often chosen with it.

BuddyMoE (Wang et al., 2025, section 3) takes experts that tokens choose together for alike, and
replaces a miss by a cached one of these *buddies*. It profiles a text beforehand; here choices are
counted while decoding, so that nothing need be prepared. Its gates by entropy and by margins are
left to the tail (see `gates`): only experts of small tails are replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from greenroom.core.pieces import Ints


class Buddies:
    """How often two experts of a layer were chosen in one step. Experts are dense ids."""

    def __init__(self, offsets: Sequence[int]) -> None:
        self._offsets = tuple(offsets)
        self.counts: list[NDArray[np.int32]] = [  # of each layer [E, E]
            np.zeros((b - a, b - a), np.int32) for a, b in pairwise(offsets)
        ]

    def note(self, layer: int, experts: Ints) -> None:
        """A step of decoding asks for these."""
        local = experts - self._offsets[layer]
        self.counts[layer][np.ix_(local, local)] += 1

    def of(self, layer: int, expert: int, able: NDArray[np.bool_]) -> int:
        """The expert of a layer most often chosen with this one, of those that are `able` [E];
        -1 where none of them ever was. The smallest id of several alike."""
        first = self._offsets[layer]
        together = np.where(able, self.counts[layer][expert - first], 0)
        best = int(together.argmax())
        return first + best if together[best] > 0 else -1
