"""Slow, obvious versions of the learning predictors' scores, in plain NumPy."""

from __future__ import annotations

from collections import Counter

import numpy as np

from greenroom.core.predictor import PassStart, Shape

Path = dict[tuple[int, int], list[int]]  # (token, layer) -> experts; tokens counted from the start


class PlainMarkov:
    """Counts of pairs (layer, expert before, expert after)."""

    def __init__(self, shape: Shape, distance: int) -> None:
        self.shape, self.distance = shape, distance
        self.pairs: Counter[tuple[int, int, int]] = Counter()
        self.counted: set[tuple[int, int]] = set()  # (token, layer) before
        self.path: Path = {}
        self.request: dict[int, int] = {}

    def observe(self, at: PassStart, layer: int, experts: list[list[int]]) -> None:
        for i, row in enumerate(experts):
            self.path[at.first + i, layer] = row
            self.request[at.first + i] = at.request
        for i in range(at.tokens):
            token = at.first + i
            self._pair(token, layer - self.distance, token, layer)
            self._pair(token, layer, token, layer + self.distance)

    def _pair(self, before: int, source: int, after: int, target: int) -> None:
        """Count a pair once both of its ends are known."""
        layers = self.shape.layers
        if source < 0:
            before, source = before - 1, source + layers
        if target >= layers:
            after, target = after + 1, target - layers
        if (before, source) in self.path and (after, target) in self.path:
            if self.request[before] != self.request[after] or (before, source) in self.counted:
                return
            self.counted.add((before, source))
            for e in self.path[before, source]:
                for f in self.path[after, target]:
                    self.pairs[source, e, f] += 1

    def scores(self, layer: int, used: list[int]) -> np.ndarray:
        target = (layer + self.distance) % self.shape.layers
        most = max(self.shape.experts_per_layer)
        experts = self.shape.experts_per_layer[target]
        counts = np.array(
            [[self.pairs[layer, e, f] + 0.1 for f in range(experts)] for e in range(most)]
        )
        joint = np.log(counts[used]).sum(axis=0)
        return joint - (len(used) - 1) * np.log(counts.sum(axis=0))


class PlainEamc:
    """EAMs as dictionaries of arrays [layers, experts], compared by cosine."""

    def __init__(
        self, shape: Shape, capacity: int, by_request: bool, tolerance: float = 0.0
    ) -> None:
        self.shape, self.capacity, self.by_request = shape, capacity, by_request
        self.tolerance = tolerance
        self.collections: dict[bool, list[np.ndarray]] = {True: [], False: []}
        self.growing = {part: self._empty() for part in (True, False)}
        self.matched = {part: self._empty() for part in (True, False)}
        self.request = -1

    def _empty(self) -> np.ndarray:
        return np.zeros((self.shape.layers, max(self.shape.experts_per_layer)))

    def begin(self, at: PassStart) -> None:
        if at.request != self.request:
            for part in (True, False):
                if self.growing[part].any():
                    self._keep(part)
                self.growing[part] = self._empty()
                self.matched[part] = self._empty()
        elif not self.by_request:
            self.matched[at.prefill] = self._empty()
        self.request = at.request

    def _keep(self, part: bool) -> None:
        collection = self.collections[part]
        if len(collection) < self.capacity:
            collection.append(self.growing[part])
        else:
            collection[int(np.argmax(self._cosines(self.growing[part], part)))] = self.growing[part]

    def _cosines(self, eam: np.ndarray, part: bool) -> list[float]:
        # Rounded, so that equal cosines are found equal.
        return [
            round(float((eam * other).sum() ** 2 / (other * other).sum()), 9)
            for other in self.collections[part]
        ]

    def observe(self, at: PassStart, layer: int, experts: list[list[int]]) -> None:
        for row in experts:
            for eam in (self.growing[at.prefill], self.matched[at.prefill]):
                eam[layer, row] += 1

    def scores(self, at: PassStart, layer: int, target: int) -> np.ndarray:
        layers, collection = self.shape.layers, self.collections[at.prefill]
        eam = self.matched[at.prefill]
        if collection:
            cosines = self._cosines(eam, at.prefill)
            least = max(cosines)
            if self.tolerance:
                length = np.sqrt((eam * eam).sum())
                cosines = [np.sqrt(c) / length for c in cosines]
                least = max(cosines) - self.tolerance
            nearest = [e for e, c in zip(collection, cosines, strict=True) if c >= least]
            eam = np.sum(nearest, axis=0)
        row = eam[target % layers]
        return row / max(row.sum(), 1) * (1 - (target - layer) / layers)


class PlainPath:
    """Logistic regressions over dictionaries of weights."""

    def __init__(self, shape: Shape, distance: int) -> None:
        self.shape, self.distance = shape, distance
        self.weights: dict[tuple, np.ndarray] = {}
        self.path: Path = {}
        self.request: dict[int, int] = {}
        self.id: dict[int, int] = {}
        self.now = 0  # the request under way, which a token to come belongs to

    def begin(self, at: PassStart) -> None:
        self.now = at.request
        for i in range(at.tokens):
            self.request[at.first + i] = at.request
            if at.token_ids is not None:
                self.id[at.first + i] = int(at.token_ids[i])

    def _get(self, key: tuple, layer: int) -> np.ndarray:
        experts = self.shape.experts_per_layer[layer]
        if key not in self.weights:
            first = -np.log(experts / self.shape.top_k - 1) if key[0] == "bias" else 0.0
            self.weights[key] = np.full(experts, first)
        return self.weights[key]

    def _keys(self, token: int, layer: int) -> tuple[list[tuple], list[tuple]]:
        """Return the keys of the weights of the early logits, and of their corrections."""

        def used(at: int, source: int) -> list[int]:
            same = self.request.get(at) == self.request.get(token, self.now)
            return self.path.get((at, source), []) if same else []

        early: list[tuple] = [("bias", layer)]
        if token in self.id:
            early.append(("id", self.id[token], layer))
        early += [("last", layer, e) for e in used(token - 1, layer)]
        links = []
        for m in range(3):
            back, source = divmod(layer - self.distance - m, self.shape.layers)
            if back >= -1:
                links += [("link", m, layer, e) for e in used(token + back, source)]
        return early, links

    def logits(self, token: int, layer: int, corrected: bool) -> np.ndarray:
        early, links = self._keys(token, layer)
        keys = early + links if corrected else early
        return np.sum([self._get(key, layer) for key in keys], axis=0)

    def observe(self, at: PassStart, layer: int, experts: list[list[int]]) -> None:
        for i, row in enumerate(experts):
            self.path[at.first + i, layer] = row
        for i, row in enumerate(experts):
            token = at.first + i
            early, links = self._keys(token, layer)
            truth = np.isin(np.arange(self.shape.experts_per_layer[layer]), row)
            first = truth - 1 / (1 + np.exp(-self.logits(token, layer, False)))
            second = truth - 1 / (1 + np.exp(-self.logits(token, layer, True)))
            rates = {"bias": 0.03, "id": 2.0, "last": 0.1}
            for key in early:
                self.weights[key] = self._get(key, layer) + rates[key[0]] * first
            for key in links:
                self.weights[key] = self._get(key, layer) + 0.1 * second
