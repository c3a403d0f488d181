"""What to prefetch: predictions become chances, chances become candidates, and value decides.

A predictor names experts in order. How often the one at each rank is used is counted while it runs
(by layer, with all layers as the prior), so that a rank has a chance of use, whatever the
predictor's own scores mean. A wish is a piece that is predicted and not there. It is worth

    (chance - regret) * min(transfer, idle) - (1 - chance) * (delay + CARRY * transfer)    seconds

where `transfer` is what bringing it takes, `idle` what the link has left for prefetches until its
layer is routed (the overlap budget: the layers' pace, less the time in which demands are under
way), and `regret` the chance that what it evicts would be used when its layer comes next. `delay`
is how long demands would wait for a wrong one: half a chunk where the link's gaps are longer than
chunks, and where they are shorter nearly all of it, as each chunk then overruns its gap. So where
the link is saturated nothing is prefetched but what is nearly certain. A transfer is not free where
the link is idle either: it takes a share CARRY of its time from what computes, on memory's way.
Nearer layers go first.

In prefill nearly every expert is used, so the next layer's experts are wished for by how often
prompts used them; predictors of single tokens have nothing to say there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from greenroom.core.pieces import Ints, Pieces
from greenroom.core.prefetch.pace import Pace

KEEP = 0.98  # of a rank's counts at every prediction: about the last fifty count
PRIOR = 8.0  # predictions that all layers' record counts for in a layer's
CARRY = 0.2  # of a transfer's time: what it takes from computing
FIRST_CHANCE = 0.5  # of use, of any rank, before anything is known


class PrefetchCandidate(NamedTuple):
    piece: int
    layer: int
    chance: float


class Expected(NamedTuple):
    """What was predicted for a layer and not been checked yet."""

    pieces: Ints  # likeliest first
    ranked: list[int]  # the same
    distance: int


class Ranks:
    """Of each rank, decayed: how often it was asked for, and how often it was used."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.used: list[float] = []

    def widen(self, width: int) -> None:
        more = [0.0] * (width - len(self.asked))
        self.asked += more
        self.used += more

    def count(self, rank: int, used: bool) -> None:
        self.asked[rank] = self.asked[rank] * KEEP + 1.0
        self.used[rank] = self.used[rank] * KEEP + used


class Accuracy:
    """Per layer: experts used, those among the top-k predicted, and of these the ones in time."""

    def __init__(self, layers: int) -> None:
        self.used = [0] * layers
        self.right = [0] * layers
        self.in_time = [0] * layers
        self.distance = [0] * layers  # of the latest prediction

    def reset(self) -> None:
        """Count from here on."""
        for counts in (self.used, self.right, self.in_time):
            counts[:] = [0] * len(counts)

    def by_layer(self) -> list[float | None]:
        """Accuracy of each layer's predictions; None where there were none."""
        pairs = zip(self.right, self.used, strict=True)
        return [right / used if used else None for right, used in pairs]

    def share(self) -> float | None:
        """Accuracy over all layers; None where nothing was predicted."""
        used = sum(self.used)
        return sum(self.right) / used if used else None

    def good(self) -> float | None:
        """GOODPRED (ProMoE, 4.1): accuracy x share of the right ones that were there in time."""
        used = sum(self.used)
        return sum(self.in_time) / used if used else None


class Lookahead:
    """Wishes of all layers. Layers are counted cyclically: after the last comes the next pass.

    All of it is plain Python over a dozen numbers at a time: it runs once a layer, under a lock,
    and an operation of NumPy takes as long as ten of them.
    """

    def __init__(self, pieces: Pieces) -> None:
        self.pace, self.accuracy = Pace(), Accuracy(pieces.layers)
        self._layers = pieces.layers
        self._ranges = list(pairwise(pieces.offsets))
        self._expected: list[Expected | None] = [None] * self._layers
        self.candidates: dict[
            int, deque[tuple[int, float]]
        ] = {}  # layer -> (piece, chance), not empty
        self._ranks, self._all = [Ranks() for _ in range(self._layers)], Ranks()
        self._chunks = pieces.chunks.tolist()
        self._at = self._layers - 1  # the layer that was routed last
        self._prefill = False
        self._layer_of = pieces.layer.tolist()
        self._victims: list[set[int]] = [set() for _ in range(self._layers)]
        self.regret = 0.0  # chance that a victim of a prefetch is used in its layer's next step
        self._prompts = np.ones(len(pieces))  # decayed share of prompts' steps that used a piece

    def expect(self, layer: int, pieces: Ints) -> None:
        """A prediction for a layer, likeliest first; it takes the place of an earlier one."""
        ranked: list[int] = pieces.tolist()
        self._expected[layer] = Expected(pieces, ranked, self.ahead(layer))
        self._set_candidates(layer, ranked, self._chances(layer, len(ranked)))

    def decided(self, layer: int, pieces: Ints) -> None:
        """A layer's experts are known before its step begins; what was predicted is still checked
        then."""
        self._set_candidates(layer, pieces.tolist(), [1.0] * pieces.size)

    def _set_candidates(self, layer: int, pieces: Sequence[int], chances: Sequence[float]) -> None:
        if pieces:
            self.candidates[layer] = deque(zip(pieces, chances, strict=True))
        else:
            self.candidates.pop(layer, None)

    def ahead(self, layer: int) -> int:
        """Layers from the one routed last to this one, at least 1."""
        return (layer - self._at - 1) % self._layers + 1

    def routed(
        self, layer: int, pieces: Ints, prefill: bool, now: float, slot_of: Ints
    ) -> Expected | None:
        """A layer's routing is known: its candidates are over. Returns what had been predicted.

        `slot_of` [pieces] is negative for those that are not resident (before this step).
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
        """Count a prompt's step, and wish for the next layer's experts by what prompts use."""
        begin, end = self._ranges[layer]
        share = self._prompts[begin:end]
        share *= KEEP
        share[pieces - begin] += 1 - KEEP
        if layer + 1 < self._layers:
            begin, end = self._ranges[layer + 1]
            share = self._prompts[begin:end]
            order = np.argsort(-share, kind="stable")
            self._set_candidates(layer + 1, (begin + order).tolist(), share[order].tolist())

    def _check(self, layer: int, expected: Expected, used: set[int], absent: list[bool]) -> None:
        """Learn how often each rank is right; count accuracy among the top-k.

        Only what is not resident is ever wished for, and it is used less than its rank says.
        """
        own, k, right = self._ranks[layer], len(used), 0
        for rank, piece in enumerate(expected.ranked):
            was_used = piece in used
            right += was_used and rank < k
            if absent[rank]:
                own.count(rank, was_used)
                self._all.count(rank, was_used)
        accuracy = self.accuracy
        accuracy.used[layer] += k
        accuracy.right[layer] += right
        accuracy.distance[layer] = expected.distance

    def evicted(self, piece: int) -> None:
        """A resident made room for a prefetch."""
        self._victims[self._layer_of[piece]].add(piece)

    def _regret(self, layer: int, pieces: Ints) -> None:
        """How often the victims of prefetches were used in the very next step of their layer."""
        victims = self._victims[layer]
        if victims:
            used = victims.intersection(pieces.tolist())
            share, keep = len(used) / len(victims), KEEP ** len(victims)
            self.regret = keep * self.regret + (1 - keep) * share
            victims.clear()

    def _chances(self, layer: int, width: int) -> list[float]:
        """Of use, by rank."""
        own, every = self._ranks[layer], self._all
        own.widen(width)
        every.widen(width)
        counts = zip(own.used[:width], own.asked, every.used, every.asked, strict=False)
        return [
            (used + PRIOR * ((all_used + FIRST_CHANCE) / (all_asked + 1))) / (asked + PRIOR)
            for used, asked, all_used, all_asked in counts
        ]

    def clear(self) -> None:
        """Drop all candidates."""
        self.candidates.clear()

    def nearest(
        self,
        slot_of: Ints | None = None,
        held: Container[int] = (),
        may: Callable[[int], bool] | None = None,
        chunks: Callable[[int], int] | None = None,
    ) -> PrefetchCandidate | None:
        """The next wish worth its transfer; those before it that are not are given up, and so are
        those that are there: resident by `slot_of` (negative where not), or `held`. Pieces that
        `may` not begin now are passed over. `chunks` says what of a piece is to be moved."""
        count = chunks or self._chunks.__getitem__
        for layer in sorted(self.candidates, key=self.ahead):
            candidates, ahead, passed = self.candidates[layer], self.ahead(layer), 0
            while len(candidates) > passed:
                piece, chance = candidates[passed]
                there = piece in held or (slot_of is not None and slot_of[piece] >= 0)
                if there or self.value(count(piece), chance, ahead) <= 0:
                    del candidates[passed]
                elif may is None or may(piece):
                    return PrefetchCandidate(piece, layer, chance)
                else:
                    passed += 1
            if not candidates:
                del self.candidates[layer]
        return None

    def remove(self, candidate: PrefetchCandidate) -> None:
        """The wish is on its way, or not needed."""
        candidates = self.candidates[candidate.layer]
        candidates.remove((candidate.piece, candidate.chance))
        if not candidates:
            del self.candidates[candidate.layer]

    def value(self, chunks: int, chance: float, layers: int) -> float:
        """Seconds that a prefetch of so many chunks is expected to save, so many layers ahead."""
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
