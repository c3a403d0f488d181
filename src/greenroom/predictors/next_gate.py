"""next-gate: the router of the layer `distance` ahead, asked with the hidden states of this one.

A layer adds little to the residual stream, so what enters the gate of layer l is close to what
will enter that of layer l + distance. Mixtral offloading (Eliseev and Mazur), MoEpic 3.2, Fate;
ProMoE 4.3 calls it skip-based. Beyond the last layer the routers of the first ones are asked about
the next token with the states of the one before it: expect less there.
"""

from __future__ import annotations

from greenroom.core.predictor import Ids, Inputs
from greenroom.errors import UsageError
from greenroom.predictors.inputs import FromInputs
from greenroom.predictors.kind import Kind, Setting


class NextGate(FromInputs):
    """Asks the model's routers. It learns nothing, and keeps one layer's inputs."""

    name = "next-gate"

    def __init__(self, setting: Setting) -> None:
        if setting.gates is None:
            raise UsageError(
                "predictor next-gate asks the model's own routers: it runs beside a model only"
                " (record it with a trace, and replay `recorded`)"
            )
        super().__init__(setting)
        self._gates = setting.gates

    def _rank(self, target: int, rows: Inputs) -> Ids:
        return self._gates.rank(target, rows, self._shape.width)


next_gate = Kind(
    "next-gate",
    NextGate,
    "a later layer's router, fed with this layer's input",
    frozenset({"inputs", "gates"}),
    distance=1,
)
