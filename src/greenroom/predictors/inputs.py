"""What predictors share that go by the hidden states which enter a layer's gate."""

from __future__ import annotations

from abc import abstractmethod

from greenroom.core.predictor import Guess, Ids, Inputs, PassBegins, Seen
from greenroom.predictors.none import Nothing


class FromInputs(Nothing):
    """Ranks the experts `distance` layers ahead by one layer's inputs, and keeps no others.

    For layers of the next pass the inputs are those of this pass's last token.
    """

    _inputs: Inputs | None = None

    def begin(self, at: PassBegins) -> None:
        self._inputs = None

    def observe(self, seen: Seen) -> None:
        self._inputs = seen.inputs

    def predict(self, layer: int) -> list[Guess]:
        if self._inputs is None:
            return []
        beyond, target = divmod(layer + self._ahead, self._shape.layers)
        rows = self._inputs[-1:] if beyond else self._inputs
        return [Guess(layer + self._ahead, self._rank(target, rows))]

    @abstractmethod
    def _rank(self, target: int, rows: Inputs) -> Ids:
        """[T, H] -> [T, width], likeliest first."""
