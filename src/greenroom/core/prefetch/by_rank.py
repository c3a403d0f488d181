"""Prefetch candidates by rank alone: every predicted expert that is not resident is fetched.

Papers prefetch this way: the nearest layer first, the likeliest expert first, and as many experts
of a layer as a token uses (ProMoE, section 4.4), or all predicted ones (MoEpic, section 3.2). No
statistics of ranks or of evicted experts are collected, and every candidate is fetched, whether or
not the time that it saves is worth its transfer.
"""

from __future__ import annotations

from greenroom.core.config.base import TOP_K, VALUE
from greenroom.core.pieces import Ints, Pieces
from greenroom.core.prefetch.lookahead import LayerForecast, Lookahead
from greenroom.errors import UsageError


class RankedLookahead(Lookahead):
    """Prefetch candidates in the order of their ranks, whatever a prefetch is expected to save.

    A prefetch displaces no other prefetch: the next one waits for a free slot.
    """

    displaces = False

    def __init__(self, pieces: Pieces, depth: int | None) -> None:
        """Build the candidates of all layers; `depth` is the top-k of the model, or None for all.

        If a decoding step uses more experts than `depth`, as with several sequences, as many
        experts of the next layers are candidates.
        """
        super().__init__(pieces)
        self._depth = self._limit = depth

    def expect(self, layer: int, pieces: Ints, distance: int = 0) -> None:
        """Set a layer's predicted experts; the likeliest ones, up to `depth`, are candidates."""
        ranked = self._set_forecast(layer, pieces, distance)
        likeliest = ranked[: self._limit]
        self._set_candidates(layer, likeliest, [1 / (1 + rank) for rank in range(len(likeliest))])

    def routed(
        self, layer: int, pieces: Ints, prefill: bool, now: float, slot_of: Ints
    ) -> LayerForecast | None:
        """Compare a layer's prediction with its router's choice; returns the prediction."""
        if self._depth is not None and not prefill:
            self._limit = max(self._depth, pieces.size)
        return super().routed(layer, pieces, prefill, now, slot_of)

    def evicted(self, piece: int) -> None:
        """Ignore that a prefetch has evicted an expert; prefetching by rank does not use it."""

    def value(self, chunks: int, chance: float, layers: int) -> float:
        """Return a positive value: every prefetch candidate is worth its transfer."""
        return 1.0

    def _check(
        self, layer: int, expected: LayerForecast, used: set[int], absent: list[bool]
    ) -> None:
        """Count the accuracy of a layer's prediction among the top-k."""
        right = used.intersection(expected.ranked[: len(used)])
        self._count_accuracy(layer, expected, len(used), len(right))


def lookahead_of(pieces: Pieces, rule: str, top_k: int = 0) -> Lookahead:
    """Build the prefetch candidates of a run or a simulation for a prefetch rule.

    rule:  value (only what is expected to save time), top-k or all (see the module)
    top_k: the number of experts that a token uses in a layer, which the rule top-k needs

    UsageError if the rule is top-k, and top_k is 0.
    """
    if rule == VALUE:
        return Lookahead(pieces)
    if rule == TOP_K and not top_k:
        raise UsageError(
            "--prefetch-rule top-k needs to know how many experts a token uses: use the rule all"
        )
    return RankedLookahead(pieces, top_k if rule == TOP_K else None)
