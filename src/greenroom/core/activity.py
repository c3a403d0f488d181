"""Statistics of expert activations and predictions during decoding, for MoEpic's configurator.

MoEpic (section 3.4.2) counts over all tokens so far, for each layer:

 - H(C): the share of the activated experts that were among the C of the highest cache priority;
 - P(y): the share of the tokens that activated the expert predicted at rank y;
 - PH(y, C): the share of the tokens whose expert predicted at rank y was among these C experts.

An expert's cache priority is that of LCP, MoEpic's eviction policy (section 3.3): the number of its
activations so far, times rho for every omega tokens since the last one. The priority does not
depend on what a real cache holds, so one recording gives the figures for every C.
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
    """Counts of activated and predicted experts by layer, for MoEpic's configurator.

    The counts give MoEpic's hit ratio H, prediction accuracy P and joint share PH (section 3.4.2).

    experts:    the number of experts of each layer
    tokens:     the number of tokens counted in each layer
    rho, omega: an expert's cache priority is multiplied by rho for every omega tokens without use

    Expert ids are within their layer: from 0 in each layer.
    """

    def __init__(self, experts: Sequence[int], rho: float = RHO, omega: float = OMEGA) -> None:
        self.experts, self._fade = tuple(experts), np.log(rho) / omega
        layers, sizes = len(experts), np.array(experts)
        self._counted: dict[str, NDArray[Any]] = {}
        self._uses, self._last = (self._each(name, sizes) for name in ("uses", "last"))
        self._hits, self._right = (self._each(name, sizes + 1) for name in ("hits", "right"))
        self._clock = np.zeros(layers)  # tokens of each layer so far
        self.tokens, self.activated = np.zeros((2, layers), np.int64)
        self._counted |= {
            "clock": self._clock, "tokens": self.tokens, "activated": self.activated,
        }  # fmt: skip
        both = self._each("both", (sizes + 1) ** 2)
        self._both = [square.reshape(n + 1, n + 1) for square, n in zip(both, experts, strict=True)]

    def _each(self, name: str, sizes: Ints) -> list[Floats]:
        """Return a view of each layer's counts in one new array of `_counted`."""
        self._counted[name] = np.zeros(sizes.sum())
        return np.split(self._counted[name], np.cumsum(sizes)[:-1])

    def token(self, layer: int, chosen: Ints, predicted: Ints | None = None) -> None:
        """Count a token, and the experts of one layer that it activated.

        chosen:    ids of the activated experts, from 0 in each layer
        predicted: ids of the experts that were predicted for the token, likeliest first; None if
                   there was no prediction
        """
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
        """Sort a layer's experts by cache priority, the highest first; ties by ascending id."""
        uses = self._uses[layer]
        silent = self._clock[layer] - self._last[layer]
        priority = np.where(uses > 0, uses * np.exp(self._fade * silent), 0.0)
        return np.argsort(-priority, kind="stable")

    def state(self) -> dict[str, NDArray[Any]]:
        """Return copies of all arrays of activation counts by name, to be saved."""
        return {name: array.copy() for name, array in self._counted.items()}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore activation counts that an earlier run stored.

        ValueError if the stored counts are those of a model with other layers or experts.
        """
        for name, array in self._counted.items():
            if name not in state or state[name].shape != array.shape:
                raise ValueError(
                    f"the stored activation counts {name!r} do not fit this model's experts"
                )
        for name, array in self._counted.items():
            array[:] = state[name]

    def hit_ratio(self, layer: int) -> Floats:
        """Return a layer's hit ratio H(C) for every number C of cached experts.

        The result is an array [experts of the layer + 1], for C = 0 and up. The cached experts are
        those of the highest cache priority.
        """
        share: Floats = np.cumsum(self._hits[layer]) / max(1, self.activated[layer])
        return share

    def accuracy(self, layer: int) -> Floats:
        """Return the accuracy of a layer's predictions at every rank.

        The result is an array [experts of the layer + 1]: element y is the share of the tokens that
        activated the expert predicted at rank y, from 1; element 0 is 0.
        """
        share: Floats = self._right[layer] / max(1, self.tokens[layer])
        return share

    def predicted_hits(self, layer: int) -> Floats:
        """Return how often a predicted expert was cached, by its rank and the cache size.

        The result is an array [experts of the layer + 1, experts of the layer + 1]: element (y, C)
        is the share of the tokens whose expert predicted at rank y was among the C experts of the
        highest cache priority, activated or not. It is 0 where y or C is 0.
        """
        share: Floats = np.cumsum(self._both[layer], axis=1) / max(1, self.tokens[layer])
        return share
