"""next-gate: the router of the layer `distance` ahead, asked with the hidden states of this one.

A layer adds little to the residual stream, so what enters the gate of layer l is close to what
will enter that of layer l + distance. Mixtral offloading (Eliseev and Mazur), MoEpic 3.2, Fate;
ProMoE 4.3 calls it skip-based. Beyond the last layer the routers of the first ones are asked about
the next token with the states of the one before it: expect less there.
"""

from __future__ import annotations

from greenroom.core.predictor import Gates, Guess, Inputs, PassBegins, Seen, Shape
from greenroom.errors import UsageError
from greenroom.predictors.kind import Kind, Setting
from greenroom.predictors.none import Nothing


class NextGate(Nothing):
    """Asks `gates`, the model's routers. It learns nothing, and keeps one layer's inputs."""

    name = "next-gate"

    def __init__(self, shape: Shape, gates: Gates, distance: int) -> None:
        self.distance = distance
        self._shape, self._gates = shape, gates
        self._inputs: Inputs | None = None

    def begin(self, at: PassBegins) -> None:
        self._inputs = None

    def observe(self, seen: Seen) -> None:
        self._inputs = seen.inputs

    def predict(self, layer: int) -> list[Guess]:
        if self._inputs is None:
            return []
        assert self.distance is not None
        beyond, target = divmod(layer + self.distance, self._shape.layers)
        rows = self._inputs[-1:] if beyond else self._inputs
        ranked = self._gates.rank(target, rows, self._shape.width)
        return [Guess(layer + self.distance, ranked)]


def make(setting: Setting) -> NextGate:
    if setting.gates is None:
        raise UsageError(
            "predictor next-gate asks the model's own routers: it runs beside a model only"
            " (record it with a trace, and replay `recorded`)"
        )
    return NextGate(setting.shape, setting.gates, setting.ahead)


next_gate = Kind(
    "next-gate",
    make,
    "a later layer's router, fed with this layer's input",
    frozenset({"inputs", "gates"}),
    distance=1,
)
