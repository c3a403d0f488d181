"""next-gate: the router of the layer `distance` ahead, asked with the hidden states of this one.

A layer adds little to the residual stream, so what enters the gate of layer l is close to what
will enter that of layer l + distance. Mixtral offloading (Eliseev and Mazur), MoEpic 3.2, Fate;
ProMoE 4.3 calls it skip-based. Beyond the last layer the routers of the first ones are asked about
the next token with the states of the one before it: expect less there.
"""

from __future__ import annotations

from abc import abstractmethod

from greenroom.core.predictor import Ids, Inputs, LayerPrediction, LayerRouting, PassStart
from greenroom.errors import UsageError
from greenroom.predictors.helpers.kind import PredictorKind, PredictorSetup
from greenroom.predictors.none import NullPredictor


class FromInputs(NullPredictor):
    """Ranks the experts `distance` layers ahead by one layer's inputs, and keeps no others.

    For layers of the next pass the inputs are those of this pass's last token.
    """

    _inputs: Inputs | None = None

    def begin(self, at: PassStart) -> None:
        self._inputs = None

    def observe(self, seen: LayerRouting) -> None:
        self._inputs = seen.inputs

    def predict(self, layer: int) -> list[LayerPrediction]:
        if self._inputs is None:
            return []
        beyond, target = divmod(layer + self._ahead, self._shape.layers)
        rows = self._inputs[-1:] if beyond else self._inputs
        return [LayerPrediction(layer + self._ahead, self._rank(target, rows))]

    @abstractmethod
    def _rank(self, target: int, rows: Inputs) -> Ids:
        """[T, H] -> [T, width], likeliest first."""


class NextGate(FromInputs):
    """Asks the model's routers. It learns nothing, and keeps one layer's inputs."""

    name = "next-gate"

    def __init__(self, setting: PredictorSetup) -> None:
        if setting.gates is None:
            raise UsageError(
                "predictor next-gate asks the model's own routers: it runs beside a model only"
                " (record it with a trace, and replay `recorded`)"
            )
        super().__init__(setting)
        self._gates = setting.gates

    def _rank(self, target: int, rows: Inputs) -> Ids:
        return self._gates.rank(target, rows, self._shape.width)


next_gate = PredictorKind(
    "next-gate",
    NextGate,
    "a later layer's router, fed with this layer's input",
    frozenset({"inputs", "gates"}),
    distance=1,
)
