"""Statistics of expert activations and predictions during decoding, for MoEpic's configurator.

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
    """Activation counts of a model's experts by layer, for MoEpic's configurator.

    They give its hit ratio H, accuracy P and joint share PH.
    `experts[i]` is the number of experts of layer i, `tokens[i]` the number of tokens counted
    there. Expert ids are within their layer.
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
        """Count a token and the experts of one layer that it activated.

        The experts are `chosen`.

        `predicted` are the experts that were predicted for it, likeliest first.
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
        """Return copies of all activation counts by name, to be stored."""
        return {name: array.copy() for name, array in self._counted.items()}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore activation counts that an earlier run stored.

        ValueError where they are of another model.
        """
        for name, array in self._counted.items():
            if name not in state or state[name].shape != array.shape:
                raise ValueError(f"the stored counts {name} are of another model")
        for name, array in self._counted.items():
            array[:] = state[name]

    def hit_ratio(self, layer: int) -> Floats:
        """Return a layer's hit ratio for every number of cached experts.

        H(C) for C = 0 .. experts, [N + 1].
        """
        share: Floats = np.cumsum(self._hits[layer]) / max(1, self.activated[layer])
        return share

    def accuracy(self, layer: int) -> Floats:
        """Return the accuracy of a layer's predictions at every rank.

        P(y) for y = 1 .. experts, [N + 1]; P(0) is 0.
        """
        share: Floats = self._right[layer] / max(1, self.tokens[layer])
        return share

    def predicted_hits(self, layer: int) -> Floats:
        """Return the share of predictions right and cached, by rank and cache size.

        PH(y, C), [N + 1, N + 1]; 0 where y or C is.
        """
        share: Floats = np.cumsum(self._both[layer], axis=1) / max(1, self.tokens[layer])
        return share
