"""Which experts to promote to residents: those that were computed last without a slot.

An expert that is computed on the host, or from a low-precision copy, would never become a resident,
though it is asked for often. What a token computed so is fetched while the link is idle, behind
every demand and prefetch, into a borrowed slot. What its layer's next step does not ask for is
dropped on its way.
"""

from __future__ import annotations

from collections.abc import Iterable

from greenroom.core.plan import Candidate


class Recent:
    """Experts in the order in which they were computed, each once."""

    def __init__(self) -> None:
        self._layers: dict[int, int] = {}  # expert -> layer, the latest last

    def add(self, layer: int, experts: Iterable[int], most: int) -> None:
        """Experts of a layer were computed; no more than `most` are remembered."""
        for expert in experts if most else ():
            self._layers.pop(expert, None)
            self._layers[expert] = layer
            if len(self._layers) > most:
                del self._layers[next(iter(self._layers))]

    def remove(self, expert: int) -> None:
        """An expert needs no promotion now."""
        self._layers.pop(expert, None)

    def latest(self) -> list[Candidate]:
        """All of them, the latest first."""
        return [Candidate(expert, layer) for expert, layer in reversed(self._layers.items())]
