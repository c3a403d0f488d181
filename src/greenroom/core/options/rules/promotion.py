"""Promotion: experts that were computed without a cache slot are fetched to become residents.

An expert that is computed on the host, or from a low-precision copy, would never become resident,
though it is often requested. Promotion fetches the experts that the last tokens used in one of
these ways into borrowed slots, while the link is idle: after everything that a layer waits for, and
after prefetches. A fetch is dropped when the next step of the expert's layer does not request the
expert.
"""

from __future__ import annotations

from collections.abc import Iterable

from greenroom.core.plan import PromotionCandidate


class PromotionQueue:
    """A queue of experts that were computed without a cache slot and may get one.

    Each expert is in the queue once, at the place of its latest computation.
    """

    def __init__(self) -> None:
        self._layers: dict[int, int] = {}  # expert -> layer, the latest last

    def add(self, layer: int, experts: Iterable[int], most: int) -> None:
        """Add a layer's computed experts to the candidates for a cache slot.

        most: the largest number of candidates; beyond it, the oldest are dropped; 0 adds none
        """
        for expert in experts if most else ():
            self._layers.pop(expert, None)
            self._layers[expert] = layer
            if len(self._layers) > most:
                del self._layers[next(iter(self._layers))]

    def remove(self, expert: int) -> None:
        """Remove an expert from the queue of experts to fetch, since it needs no slot."""
        self._layers.pop(expert, None)

    def latest(self) -> list[PromotionCandidate]:
        """Return the experts to fetch into the cache, those computed last first."""
        return [
            PromotionCandidate(expert, layer) for expert, layer in reversed(self._layers.items())
        ]
