"""What MoEpic's configurator looks at, recorded while tokens are decoded: H, P and PH.

MoEpic (section 3.4.2) counts over all tokens so far (its q), for each layer:

 - H(C): the share of the activated experts that were among the C of the highest cache priority;
 - P(y): the share of the tokens that activated the expert predicted at rank y;
 - PH(y, C): the share of the tokens whose expert predicted at rank y was among those C.

The priority is LCP's (section 3.3): the activations so far, times rho for every omega tokens since
the last one. What is resident in a real cache of C experts has no part in it, so one recording
answers for every C.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.pieces import Ints

Floats = NDArray[np.float64]
RHO, OMEGA = 0.25, 128  # MoEpic's defaults


class Activity:
    """Counts of one model's layers; `experts[i]` is how many layer i has. Ids are the layer's own.

    `tokens[i]` have been counted in layer i.
    """

    def __init__(self, experts: Sequence[int], rho: float = RHO, omega: float = OMEGA) -> None:
        self.experts, self._fade = tuple(experts), np.log(rho) / omega
        self._uses = [np.zeros(n) for n in experts]
        self._last = [np.zeros(n) for n in experts]
        self._clock = np.zeros(len(experts))  # tokens of each layer so far
        self.tokens = np.zeros(len(self.experts), np.int64)
        self.activated = np.zeros(len(self.experts), np.int64)
        self._hits = [np.zeros(n + 1) for n in self.experts]
        self._right = [np.zeros(n + 1) for n in self.experts]
        self._both = [np.zeros((n + 1, n + 1)) for n in self.experts]

    def token(self, layer: int, chosen: Ints, predicted: Ints | None = None) -> None:
        """A token has activated the experts `chosen` of a layer, of which `predicted` had been
        expected, likeliest first."""
        n, uses, last = self.experts[layer], self._uses[layer], self._last[layer]
        self._clock[layer] += 1
        now = self._clock[layer]
        rank = np.empty(n, np.int64)  # from 1
        rank[self._order(layer)] = np.arange(1, n + 1)
        np.add.at(self._hits[layer], rank[chosen], 1)
        if predicted is not None and predicted.size:
            y = np.arange(1, predicted.size + 1)
            self._right[layer][y] += np.isin(predicted, chosen)
            self._both[layer][y, rank[predicted]] += 1
        self.tokens[layer] += 1
        self.activated[layer] += chosen.size
        uses[chosen] += 1
        last[chosen] = now

    def _order(self, layer: int) -> Ints:
        """Experts by their priority, the highest first; equal ones by their ids."""
        uses = self._uses[layer]
        silent = self._clock[layer] - self._last[layer]
        priority = np.where(uses > 0, uses * np.exp(self._fade * silent), 0.0)
        return np.argsort(-priority, kind="stable")

    def state(self) -> dict[str, NDArray[Any]]:
        """All that was counted, by name, to be kept."""
        return {
            "uses": np.concatenate(self._uses),
            "last": np.concatenate(self._last),
            "clock": self._clock.copy(),
            "tokens": self.tokens.copy(),
            "activated": self.activated.copy(),
            "hits": np.concatenate(self._hits),
            "right": np.concatenate(self._right),
            "both": np.concatenate([both.reshape(-1) for both in self._both]),
        }

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what was kept. ValueError where it is not of such a model."""
        mine = self.state()
        for name, array in mine.items():
            if name not in state or state[name].shape != array.shape:
                raise ValueError(f"{name} is of another model")
        self._clock, self.tokens = state["clock"].copy(), state["tokens"].copy()
        self.activated = state["activated"].copy()
        ends = np.cumsum(self.experts)[:-1]
        self._uses, self._last = (np.split(state[n].copy(), ends) for n in ("uses", "last"))
        wider = np.cumsum(np.array(self.experts) + 1)[:-1]
        self._hits, self._right = (np.split(state[n].copy(), wider) for n in ("hits", "right"))
        squares = np.cumsum((np.array(self.experts) + 1) ** 2)[:-1]
        each = zip(np.split(state["both"].copy(), squares), self.experts, strict=True)
        self._both = [both.reshape(n + 1, n + 1) for both, n in each]

    def hottest(self, layer: int, count: int) -> Ints:
        """The experts of the highest priority now, the highest first."""
        return self._order(layer)[:count]

    def hit_ratio(self, layer: int) -> Floats:
        """H(C) for C = 0 .. experts, [N + 1]."""
        share: Floats = np.cumsum(self._hits[layer]) / max(1, self.activated[layer])
        return share

    def accuracy(self, layer: int) -> Floats:
        """P(y) for y = 1 .. experts, [N + 1]; P(0) is 0."""
        share: Floats = self._right[layer] / max(1, self.tokens[layer])
        return share

    def predicted_hits(self, layer: int) -> Floats:
        """PH(y, C), [N + 1, N + 1]; 0 where y or C is."""
        share: Floats = np.cumsum(self._both[layer], axis=1) / max(1, self.tokens[layer])
        return share
