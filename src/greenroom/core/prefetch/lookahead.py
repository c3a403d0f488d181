"""The choice of which predicted experts to prefetch, by expected time saved.

A predictor ranks experts. How often the expert at each rank is used is counted while a model runs
(by layer, with all layers as the prior). So each rank has a chance of use, whatever the predictor's
own scores mean. A prefetch candidate is a predicted expert (or segment of one) that is not
resident. The inputs are the times of a `chunk`, of its `transfer` (all its chunks), and of the
`gap` between two layers in which the link has no demands (transfers that a layer needs). For a
candidate `layers` ahead:

    over  = max(0, 1 - gap / chunk)
    saved = min((1 - over) * transfer, layers * gap)
    delay = over * transfer + (1 - over) * min(1, chunk / gap) * chunk / 2
    value = (chance - regret) * saved - (1 - chance) * (delay + CARRY * transfer)

`regret` is the chance that the expert which the prefetch evicts would be used in the next step of
that expert's layer. `over` is the share of a chunk that overruns its gap. `delay` is the time that
demands would wait for a wrong prefetch: at most half a chunk if the gap is longer than a chunk, and
nearly the whole transfer if it is much shorter. So on a saturated link only nearly certain experts
are prefetched. A transfer on an idle link has a cost, too: it slows computation on the same memory
by a share CARRY of its time. Candidates for nearer layers go first, unless the predictor gives
its candidates priorities: then the one of highest priority goes first.

In prefill nearly every expert is used. There the candidates are the next layer's experts, by how
often prompts have used them; predictions for single tokens are not used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from greenroom.core.pieces import Ints, Pieces
from greenroom.core.prefetch.accuracy import Accuracy
from greenroom.core.prefetch.pace import Pace

KEEP = 0.98  # decay of a rank's counts at each prediction: about the last fifty count
PRIOR = 8.0  # weight of all layers' record in a layer's, in predictions
CARRY = 0.2  # share of a transfer's time by which it slows computation
FIRST_CHANCE = 0.5  # chance of use of any rank before the first count


class PrefetchCandidate(NamedTuple):
    """An expert predicted for a later layer, and its chance of use."""

    piece: int
    layer: int
    chance: float


class LayerForecast(NamedTuple):
    """A prediction of a layer's experts that has not been compared with the routing yet."""

    pieces: Ints  # likeliest first
    ranked: list[int]  # the same, as a list
    distance: int


class Ranks:
    """Counts of predicted and of used experts, by rank in the prediction; old counts decay."""

    def __init__(self) -> None:
        self.predicted: list[float] = []
        self.used: list[float] = []

    def widen(self, width: int) -> None:
        more = [0.0] * (width - len(self.predicted))
        self.predicted += more
        self.used += more

    def count(self, rank: int, used: bool) -> None:
        self.predicted[rank] = self.predicted[rank] * KEEP + 1.0
        self.used[rank] = self.used[rank] * KEEP + used


class Lookahead:
    """The prefetch candidates of all layers, with their chances of use.

    After the last layer comes the next pass's first layer.

    displaces: whether a likelier candidate takes the slot of a complete prefetch if no slot is left
    """

    # Plain Python over about a dozen numbers, which runs once for each layer under a lock: a NumPy
    # operation takes as long as ten Python operations.

    displaces = True

    def __init__(self, pieces: Pieces) -> None:
        self.pace, self.accuracy = Pace(), Accuracy(pieces.layers)
        self._layers = pieces.layers
        self._ranges = list(pairwise(pieces.offsets))
        self._expected: list[LayerForecast | None] = [None] * self._layers
        self.candidates: dict[
            int, deque[tuple[int, float]]
        ] = {}  # layer -> (piece, chance), not empty
        # layer -> piece -> priority, where the predictor has an order of its own
        self._priorities: dict[int, dict[int, float]] = {}
        self._ranks, self._all = [Ranks() for _ in range(self._layers)], Ranks()
        self._chunks = pieces.chunks.tolist()
        self._at = self._layers - 1  # the layer that was routed last
        self._prefill = False
        self._layer_of = pieces.layer.tolist()
        self._victims: list[set[int]] = [set() for _ in range(self._layers)]
        self.regret = 0.0  # chance that a prefetch's victim is used in the next step of its layer
        self._prompts = np.ones(len(pieces))  # decayed share of prompts' steps that used each piece

    def expect(self, layer: int, pieces: Ints, distance: int = 0) -> None:
        """Set a layer's predicted experts, likeliest first; they replace an earlier prediction.

        `distance` counts layers from the one after which the prediction was made; 0: from the layer
        that was routed last.
        """
        ranked = self._set_forecast(layer, pieces, distance)
        self._set_candidates(layer, ranked, self._chances(layer, len(ranked)))

    def _set_forecast(self, layer: int, pieces: Ints, distance: int) -> list[int]:
        ranked: list[int] = pieces.tolist()
        distance = (distance - 1) % self._layers + 1 if distance else self.ahead(layer)
        self._expected[layer] = LayerForecast(pieces, ranked, distance)
        return ranked

    def forecast(self, layer: int) -> Ints | None:
        """Return the experts predicted for a layer's next step, likeliest first; None if none."""
        expected = self._expected[layer]
        return None if expected is None else expected.pieces

    def expect_certain(self, layer: int, pieces: Ints) -> None:
        """Set as a layer's prefetch candidates the experts that its router has already chosen.

        The accuracy of the layer's prediction is still checked when the layer is routed.
        """
        self._set_candidates(layer, pieces.tolist(), [1.0] * pieces.size)

    def prioritise(self, layer: int, pieces: Ints, priorities: NDArray[np.floating[Any]]) -> None:
        """Set the prefetch priorities of a layer's predicted experts.

        Candidates with priorities are not ordered by the nearness of their layers. Within a layer
        the order stays that of the prediction.
        """
        self._priorities[layer] = dict(zip(pieces.tolist(), priorities.tolist(), strict=True))

    def _set_candidates(self, layer: int, pieces: Sequence[int], chances: Sequence[float]) -> None:
        if self._priorities:
            self._priorities.pop(layer, None)
        if pieces:
            self.candidates[layer] = deque(zip(pieces, chances, strict=True))
        else:
            self.candidates.pop(layer, None)

    def ahead(self, layer: int) -> int:
        """Count the layers from the last routed layer to a given one, at least 1."""
        return (layer - self._at - 1) % self._layers + 1

    def routed(
        self, layer: int, pieces: Ints, prefill: bool, now: float, slot_of: Ints
    ) -> LayerForecast | None:
        """Compare a layer's prediction with its router's choice; return the prediction.

        pieces:  the ids of the experts (or top segments) that the router chose
        slot_of: for each piece its cache slot before this step; negative if it had none

        In prefill nothing is compared; the next layer's candidates are set, and None is returned.
        """
        self.pace.routed(now, prefill, same_pass=layer > self._at)
        self._at, self._prefill = layer, prefill
        self.candidates.pop(layer, None)
        expected, self._expected[layer] = self._expected[layer], None
        if prefill:
            self._prompt_step(layer, pieces)
            return None
        if expected is not None:
            absent = (slot_of[expected.pieces] < 0).tolist()
            self._check(layer, expected, set(pieces.tolist()), absent)
        self._regret(layer, pieces)
        return expected

    def _prompt_step(self, layer: int, pieces: Ints) -> None:
        """Count a prompt's step; the next layer's candidates are those that prompts use."""
        begin, end = self._ranges[layer]
        share = self._prompts[begin:end]
        share *= KEEP
        share[pieces - begin] += 1 - KEEP
        if layer + 1 < self._layers:
            begin, end = self._ranges[layer + 1]
            share = self._prompts[begin:end]
            order = np.argsort(-share, kind="stable")
            self._set_candidates(layer + 1, (begin + order).tolist(), share[order].tolist())

    def _check(
        self, layer: int, expected: LayerForecast, used: set[int], absent: list[bool]
    ) -> None:
        """Count how often each rank is used, and the accuracy among the top-k.

        Ranks are counted for pieces that are not resident only: candidates are such pieces, and
        they are used less often than resident ones of the same rank.
        """
        ranks, k, right = self._ranks[layer], len(used), 0
        for rank, piece in enumerate(expected.ranked):
            was_used = piece in used
            right += was_used and rank < k
            if absent[rank]:
                ranks.count(rank, was_used)
                self._all.count(rank, was_used)
        self._count_accuracy(layer, expected, k, right)

    def _count_accuracy(self, layer: int, expected: LayerForecast, used: int, right: int) -> None:
        counts = self.accuracy.of(layer, expected.distance)
        counts.used += used
        counts.right += right

    def evicted(self, piece: int) -> None:
        """Record an expert that a prefetch evicted, to count whether it is used soon after."""
        self._victims[self._layer_of[piece]].add(piece)

    def _regret(self, layer: int, pieces: Ints) -> None:
        """Update the share of victims that are used in the next step of their layer."""
        victims = self._victims[layer]
        if victims:
            used = victims.intersection(pieces.tolist())
            share, keep = len(used) / len(victims), KEEP ** len(victims)
            self.regret = keep * self.regret + (1 - keep) * share
            victims.clear()

    def _chances(self, layer: int, width: int) -> list[float]:
        """Return the chances of use of a layer's predicted experts, by rank."""
        ranks, every = self._ranks[layer], self._all
        ranks.widen(width)
        every.widen(width)
        counts = zip(ranks.used[:width], ranks.predicted, every.used, every.predicted, strict=False)
        return [
            (used + PRIOR * ((all_used + FIRST_CHANCE) / (all_predicted + 1))) / (predicted + PRIOR)
            for used, predicted, all_used, all_predicted in counts
        ]

    def clear(self) -> None:
        """Drop the prefetch candidates of all layers."""
        self.candidates.clear()

    def nearest(
        self,
        slot_of: Ints | None = None,
        borrowed: Container[int] = (),
        can_start: Callable[[int], bool] | None = None,
        chunks: Callable[[int], int] | None = None,
    ) -> PrefetchCandidate | None:
        """Find the prefetch candidate that comes next and is worth its transfer.

        The candidate is of the nearest layer, or has the highest priority if the predictor gave
        priorities; candidates without priorities then come first.

        A piece is an unsplit expert, or a segment of a split one.

        slot_of:   for each piece its cache slot; negative if it has none
        borrowed:  the pieces in borrowed slots
        can_start: tells whether the transfer of a piece can start now; other candidates are passed
                   over
        chunks:    returns the number of chunks of a piece that are to be transferred

        Candidates that are not worth their transfer, or have a slot already, are dropped during the
        search. None if no candidate is left that can start.
        """
        count = chunks or self._chunks.__getitem__
        priorities, best, most = self._priorities, None, -np.inf
        for layer in sorted(self.candidates, key=self.ahead):
            candidates, ahead, passed = self.candidates[layer], self.ahead(layer), 0
            while len(candidates) > passed:
                piece, chance = candidates[passed]
                has_slot = piece in borrowed or (slot_of is not None and slot_of[piece] >= 0)
                if has_slot or self.value(count(piece), chance, ahead) <= 0:
                    del candidates[passed]
                elif can_start is not None and not can_start(piece):
                    passed += 1
                elif layer not in priorities:
                    return PrefetchCandidate(piece, layer, chance)
                else:
                    if priorities[layer][piece] > most:
                        most = priorities[layer][piece]
                        best = PrefetchCandidate(piece, layer, chance)
                    break
            if not candidates:
                del self.candidates[layer]
        return best

    def remove(self, candidate: PrefetchCandidate) -> None:
        """Remove a prefetch candidate that is being fetched or needs no transfer."""
        candidates = self.candidates[candidate.layer]
        candidates.remove((candidate.piece, candidate.chance))
        if not candidates:
            del self.candidates[candidate.layer]

    def value(self, chunks: int, chance: float, layers: int) -> float:
        """Return the seconds that a prefetch is expected to save; the module has the formula.

        chunks: the chunks to be transferred
        chance: the chance that the expert is used
        layers: how many layers ahead the expert's layer is
        """
        chunk = self.pace.chunk.value
        if chunk is None:
            chunk = 1.0
        transfer = chunk * chunks
        gap = self.pace.idle[self._prefill].value
        if gap is None:
            gap = transfer
        idle = layers * gap
        over = max(0.0, 1.0 - gap / chunk)
        saved = min(transfer * (1 - over), idle)
        delay = over * transfer + (1 - over) * min(1.0, chunk / gap if gap else 1.0) * chunk / 2
        gain = (chance - self.regret) * saved
        return gain - (1 - chance) * (delay + CARRY * transfer)
