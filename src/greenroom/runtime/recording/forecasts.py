"""What predictors say beside a running model, as a trace holds it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from greenroom.core.predictor import LayerPrediction, LayerRouting, PassStart, Predictor, Shape
from greenroom.errors import UsageError
from greenroom.predictors import AUTO, PredictorChoice, predictor

NOTHING = -1  # where a predictor expected nothing; a trace has the largest value of its type

Rows = NDArray[np.int64]


def parse_predictors(text: str) -> list[PredictorChoice]:
    """The predictors of `NAME[:distance],...` that can run beside a model.

    Options keep their commas: `markov:2,option=1,next-gate`. UsageError says which name is wrong.
    """
    names: list[str] = []
    for part in text.split(","):
        if names and "=" in part.partition(":")[0]:
            names[-1] += f",{part}"
        else:
            names.append(part)
    if len(set(names)) < len(names):
        raise UsageError(f"--predict {text}: a predictor is named twice")
    found = [predictor(name) for name in names]
    for choice in found:
        if choice.kind is AUTO or "trace" in choice.kind.needs:
            raise UsageError(f"--predict {choice.name}: predicts where a trace is replayed only")
    return found


def distance_of(made: Predictor) -> int:
    """How many layers ahead; 0 for one that predicts a pass before it begins."""
    return made.distance or 0


class ForecastRecorder:
    """Runs predictors: `begin` a pass, tell each `layer`, and at its `end` take what they said.

    What counts is what a replay of the trace would count (tests/predictors/replay.py): guesses made
    `distance` layers before or earlier, of several the last. What is said when a pass begins counts
    where no distance is asked for, and for passes of several tokens.
    """

    def __init__(self, predictors: Mapping[str, Predictor], shape: Shape) -> None:
        self._predictors, self._shape = predictors, shape
        self._after: dict[str, Rows] = {}  # [L, width] of the token after this pass
        self._said: dict[str, Rows] = {}  # [T, L, width] of this pass

    def begin(self, at: PassStart) -> None:
        shape = (at.tokens, self._shape.layers, self._shape.width)
        announced = at.first == 0 or at.tokens > 1
        before, self._after = self._after, {}
        for name, made in self._predictors.items():
            self._said[name] = np.full(shape, NOTHING)
            if name in before:
                self._said[name][0] = before[name]
            self._after[name] = np.full(shape[1:], NOTHING)
            made.begin(at)
            guesses = made.predict(-1)
            if announced or not distance_of(made):
                self._keep(name, guesses, -1, 0)

    def layer(self, seen: LayerRouting) -> None:
        for name, made in self._predictors.items():
            made.observe(seen)
            self._keep(name, made.predict(seen.layer), seen.layer, distance_of(made))

    def _keep(self, name: str, guesses: list[LayerPrediction], layer: int, least: int) -> None:
        """Those of a guess after `layer` that lie `least` layers ahead or further."""
        for guess in guesses:
            if guess.layer - layer >= least:
                width = min(self._shape.width, guess.experts.shape[1])
                beyond, target = divmod(guess.layer, self._shape.layers)
                rows = self._after[name][None, target] if beyond else self._said[name][:, target]
                rows[:] = NOTHING
                rows[:, :width] = guess.experts[:, :width]

    def end(self) -> dict[str, Rows]:
        """What each predictor said of this pass: [T, L, width]."""
        said, self._said = self._said, {}
        return said
