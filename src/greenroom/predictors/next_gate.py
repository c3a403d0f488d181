"""next-gate: predicts experts by the router of a later layer, fed with this layer's inputs.

A layer adds little to the residual stream, so the input of layer l's router is close to that of
layer l + distance. Mixtral offloading (Eliseev and Mazur), MoEpic (3.2) and Fate use this; ProMoE
(4.3) calls it skip-based. Beyond the last layer, the routers of the first layers are applied to the
hidden states of this token to predict the next one: these predictions are worse.

With `width=all` every expert of the layer is ranked. MoEpic (3.2) prefetches in this order until
the layer's own router has chosen.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from greenroom.core.predictor import Ids, Inputs, LayerPrediction, LayerRouting, PassStart
from greenroom.errors import UsageError
from greenroom.predictors.helpers.kind import ALL, WIDTH, PredictorKind, PredictorSetup
from greenroom.predictors.none import NullPredictor


class InputPredictor(NullPredictor):
    """Base of predictors that rank a later layer's experts by this layer's router inputs.

    Experts of the next pass are ranked by the inputs of this pass's last token.
    """

    _inputs: Inputs | None = None

    def begin(self, at: PassStart) -> None:
        self._inputs = None

    def observe(self, routing: LayerRouting) -> None:
        self._inputs = routing.inputs

    def predict(self, layer: int) -> list[LayerPrediction]:
        if self._inputs is None:
            return []
        beyond, target = divmod(layer + self._ahead, self._shape.layers)
        rows = self._inputs[-1:] if beyond else self._inputs
        return [LayerPrediction(layer + self._ahead, self._rank(target, rows))]

    @abstractmethod
    def _rank(self, target: int, rows: Inputs) -> Ids:
        """Rank a layer's experts by hidden states: [tokens, hidden] -> [tokens, width]."""


class NextGatePredictor(InputPredictor):
    """Predictor `next-gate`: applies a model's routers to the router inputs of earlier layers."""

    name = "next-gate"

    def __init__(self, setup: PredictorSetup) -> None:
        if setup.gates is None:
            raise UsageError(
                "predictor next-gate needs the model's routers, which a trace does not have: record"
                " the trace with --predict next-gate, and choose the predictor `recorded`"
            )
        super().__init__(setup)
        self._gates, layers = setup.gates, setup.shape.layers
        self._widths: Sequence[int] = [self.width] * layers
        if setup.options.get(WIDTH.name) == ALL:
            self._widths = setup.shape.experts_per_layer
            self.width = max(self._widths)

    def _rank(self, target: int, rows: Inputs) -> Ids:
        return self._gates.rank(target, rows, self._widths[target])


next_gate = PredictorKind(
    "next-gate",
    NextGatePredictor,
    "a later layer's router, fed with this layer's input",
    frozenset({"inputs", "gates"}),
    distance=1,
    options=(WIDTH,),
)
