"""What to prefetch: predictions become chances, chances become wishes, and value decides.

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
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from greenroom.core.pace import Pace
from greenroom.core.pieces import Ints, Pieces
from greenroom.core.policy import Floats

KEEP = 0.98  # of a rank's counts at every prediction: about the last fifty count
PRIOR = 8.0  # predictions that all layers' record counts for in a layer's
CARRY = 0.2  # of a transfer's time: what it takes from computing
FIRST_CHANCE = 0.5  # of use, of any rank, before anything is known


@dataclass(frozen=True, slots=True)
class Wish:
    piece: int
    layer: int
    chance: float


@dataclass(slots=True)
class Expected:
    """What was predicted for a layer and not been checked yet."""

    pieces: Ints  # likeliest first
    chances: Floats
    distance: int


class Accuracy:
    """Per layer: experts used, those among the top-k predicted, and of these the ones in time."""

    def __init__(self, layers: int) -> None:
        self.used = np.zeros(layers, np.int64)
        self.right = np.zeros(layers, np.int64)
        self.in_time = np.zeros(layers, np.int64)
        self.distance = np.zeros(layers, np.int64)  # of the latest prediction

    def reset(self) -> None:
        """Count from here on."""
        for counts in (self.used, self.right, self.in_time):
            counts[:] = 0

    def by_layer(self) -> list[float | None]:
        """Accuracy of each layer's predictions; None where there were none."""
        pairs = zip(self.right.tolist(), self.used.tolist(), strict=True)
        return [right / used if used else None for right, used in pairs]

    def share(self) -> float | None:
        """Accuracy over all layers; None where nothing was predicted."""
        used = int(self.used.sum())
        return int(self.right.sum()) / used if used else None

    def good(self) -> float | None:
        """GOODPRED (ProMoE, 4.1): accuracy x share of the right ones that were there in time."""
        used = int(self.used.sum())
        return int(self.in_time.sum()) / used if used else None


class Lookahead:
    """Wishes of all layers. Layers are counted cyclically: after the last comes the next pass."""

    def __init__(self, pieces: Pieces) -> None:
        self.pace, self.accuracy = Pace(), Accuracy(pieces.layers)
        self._pieces, self._layers = pieces, pieces.layers
        self._ranges = list(pairwise(pieces.offsets))
        self._expected: list[Expected | None] = [None] * self._layers
        self._wishes: list[deque[Wish]] = [deque() for _ in range(self._layers)]
        self._asked = np.zeros((self._layers, 0))  # [layers, rank] decayed
        self._used = np.zeros((self._layers, 0))
        self._all = np.zeros((2, 0))  # [used, asked; rank] of all layers
        self._at = self._layers - 1  # the layer that was routed last
        self._prefill = False
        self._layer_of = pieces.layer.tolist()
        self._victims: list[set[int]] = [set() for _ in range(self._layers)]
        self.regret = 0.0  # chance that a victim of a prefetch is used in its layer's next step
        self._prompts = np.ones(len(pieces))  # decayed share of prompts' steps that used a piece

    def expect(self, layer: int, pieces: Ints) -> None:
        """A prediction for a layer, likeliest first; it takes the place of an earlier one."""
        ahead = self.ahead(layer)
        chances = self._chances(layer, pieces.size)
        self._expected[layer] = Expected(pieces, chances, ahead)
        self._wish(layer, pieces, chances)

    def decided(self, layer: int, pieces: Ints) -> None:
        """A layer's experts are known before its step begins; what was predicted is still checked
        then."""
        self._wish(layer, pieces, np.ones(pieces.size))

    def _wish(self, layer: int, pieces: Ints, chances: Floats) -> None:
        wishes = zip(pieces.tolist(), chances.tolist(), strict=True)
        self._wishes[layer] = deque(Wish(piece, layer, chance) for piece, chance in wishes)

    def ahead(self, layer: int) -> int:
        """Layers from the one routed last to this one, at least 1."""
        return (layer - self._at - 1) % self._layers + 1

    def routed(
        self, layer: int, pieces: Ints, prefill: bool, now: float, slot_of: Ints
    ) -> Expected | None:
        """A layer's routing is known: its wishes are over. Returns what had been predicted.

        `slot_of` [pieces] is negative for those that are not resident (before this step).
        """
        self.pace.routed(now, prefill)
        self._at, self._prefill = layer, prefill
        self._wishes[layer].clear()
        expected, self._expected[layer] = self._expected[layer], None
        if prefill:
            self._prompt_step(layer, pieces)
            return None
        if expected is not None:
            self._check(layer, expected, pieces, slot_of[expected.pieces] < 0)
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
            self._wish(layer + 1, begin + order, share[order])

    def _check(
        self, layer: int, expected: Expected, pieces: Ints, absent: NDArray[np.bool_]
    ) -> None:
        """Learn how often each rank is right; count accuracy among the top-k.

        Only what is not resident is ever wished for, and it is used less than its rank says.
        """
        width, k = expected.pieces.size, pieces.size
        right = np.isin(expected.pieces, pieces)
        self._widen(width)
        for counts, asked in ((self._used[layer], self._asked[layer]), self._all):
            keep = np.where(absent, KEEP, 1.0)
            counts[:width] = counts[:width] * keep + (right & absent)
            asked[:width] = asked[:width] * keep + absent
        accuracy = self.accuracy
        accuracy.used[layer] += k
        accuracy.right[layer] += int(right[:k].sum())
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

    def _chances(self, layer: int, width: int) -> Floats:
        self._widen(width)
        used, asked = self._all[:, :width]
        prior = (used + FIRST_CHANCE) / (asked + 1)
        chances: Floats = (self._used[layer, :width] + PRIOR * prior) / (
            self._asked[layer, :width] + PRIOR
        )
        return chances

    def _widen(self, width: int) -> None:
        if (more := width - self._asked.shape[1]) > 0:
            self._asked, self._used, self._all = (
                np.pad(a, ((0, 0), (0, more))) for a in (self._asked, self._used, self._all)
            )

    def clear(self) -> None:
        """Wish for nothing."""
        for wishes in self._wishes:
            wishes.clear()

    def nearest(self) -> Wish | None:
        """The next wish worth its transfer; those before it that are not are given up."""
        for step in range(1, self._layers + 1):
            layer = (self._at + step) % self._layers
            wishes = self._wishes[layer]
            while wishes:
                if self.value(wishes[0], step) > 0:
                    return wishes[0]
                wishes.popleft()
        return None

    def fulfil(self, wish: Wish) -> None:
        """The wish is on its way, or not needed."""
        self._wishes[wish.layer].popleft()

    def value(self, wish: Wish, layers: int) -> float:
        """Seconds that a prefetch is expected to save, `layers` before it is needed."""
        chunk, chunks = self.pace.chunk.value, int(self._pieces.chunks[wish.piece])
        if chunk is None:
            chunk = 1.0
        transfer = chunk * chunks
        idle, gap = (self.pace.idle_until(n, self._prefill) for n in (layers, 1))
        if idle is None or gap is None:
            return wish.chance
        over = max(0.0, 1.0 - gap / chunk)
        saved = min(transfer * (1 - over), idle)
        delay = over * transfer + (1 - over) * min(1.0, chunk / gap if gap else 1.0) * chunk / 2
        gain = (wish.chance - self.regret) * saved
        return gain - (1 - wish.chance) * (delay + CARRY * transfer)
