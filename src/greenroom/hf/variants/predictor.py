"""A predictor of the model's experts, for passes whose tokens belong to variants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.predictor import Ids, LayerPrediction, LayerRouting, PassStart, Predictor
from greenroom.hf.variants.catalog import ExpertVariants
from greenroom.hf.variants.routing import MODEL


class VariantPredictor:
    """Predicts stored experts by a predictor that knows the numbers of the model's own experts.

    Variants share a router, so what the predictor learns of one variant serves all.
    """

    def __init__(self, predictor: Predictor, variants: ExpertVariants) -> None:
        self._predictor, self._variants = predictor, variants
        self.name, self.costly = predictor.name, predictor.costly
        self.distance, self.width = predictor.distance, predictor.width
        self._rows = MODEL  # the variant of each token of the pass, or of all

    def begin(self, at: PassStart) -> None:
        """Begin a forward pass; the variants of its tokens are those of `at`."""
        self._rows = MODEL if at.variants is None else at.variants
        self._predictor.begin(at)

    def observe(self, routing: LayerRouting) -> None:
        """Observe the stored experts that a layer computes, as the router's choices."""
        originals = self._variants.originals[routing.layer]
        self._predictor.observe(routing._replace(experts=originals[routing.experts]))

    def predict(self, layer: int) -> list[LayerPrediction]:
        """Predict the stored experts of the layers that follow a given one."""
        return [self._redirect(each) for each in self._predictor.predict(layer)]

    def _redirect(self, guess: LayerPrediction) -> LayerPrediction:
        layers = self._variants.stored
        layer = guess.layer % len(layers)
        rows = self._rows if len(self._rows) == len(guess.experts) else self._rows[-1:]
        ids: Ids = layers[layer][rows[:, None], guess.experts]
        ids = np.where(guess.experts < 0, -1, ids)
        priorities = guess.priorities
        if priorities is not None:
            priorities = priorities[self._variants.originals[layer][:-1]]
        return LayerPrediction(guess.layer, ids, priorities)

    def state(self) -> Mapping[str, NDArray[Any]]:
        """Return what the predictor has learned, of the model's own experts."""
        return self._predictor.state()

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore what the predictor learned in an earlier run."""
        self._predictor.restore(state)
