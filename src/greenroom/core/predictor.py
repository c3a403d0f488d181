"""The interface of predictors: they observe routing and predict which experts come next.

A predictor knows no tensors, clocks or slots. Its drivers (a run, a simulation, a recording) call
`begin` when a pass begins. For every layer they call `observe` with the choices of the layer's
router, and then `predict` for the layers ahead.

Layers are counted on beyond the end of a pass: layer `layers + j` is layer j of the next pass. So
the first layers of a token are predicted from the last layers of the token before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Inputs = NDArray[np.float32]


class PassStart(NamedTuple):
    """The start of a pass with T tokens of a request.

    `first` is the position of its first token among all tokens since the start of the run or of
    the trace, by which predictors that read a trace find their place.
    """

    request: int
    first: int
    tokens: int
    prefill: bool
    token_ids: Ids | None = None  # [T]


class LayerRouting(NamedTuple):
    """The choices of a layer's router: K experts of T tokens, in rank order, ids within the layer.

    `inputs` are the hidden states that entered the router, where the predictor needs them.
    """

    layer: int
    experts: Ids  # [T, K]
    weights: NDArray[np.float32] | None = None  # [T, K]
    inputs: Inputs | None = None  # [T, H]


class LayerPrediction(NamedTuple):
    """Experts that a predictor expects in a layer, likeliest first; ids within the layer.

    There is one row a token of this pass; or a single row where the layer is in the next pass, for
    its first token. -1 fills rows in which fewer experts are expected.
    """

    layer: int  # 0 .. 2 * layers - 1: beyond the last, a layer of the next pass
    experts: Ids  # [T or 1, width]


class Shape(NamedTuple):
    """The shape of a model's routing."""

    experts_per_layer: tuple[int, ...]
    top_k: int

    @property
    def layers(self) -> int:
        return len(self.experts_per_layer)

    @property
    def width(self) -> int:
        """Experts in a prediction: twice top-k, at most all of the smallest layer."""
        return min(2 * self.top_k, *self.experts_per_layer)


class Gates(Protocol):
    """The routers of a model, callable outside of a forward pass."""

    def rank(self, layer: int, inputs: Inputs, width: int) -> Ids:
        """The experts that a layer's router would choose, likeliest first: [T, H] -> [T, width]."""
        ...


class Predictor(Protocol):
    """A predictor of one model, while it runs.

    `distance` is how many layers ahead `predict` looks; None where it may predict any layer.
    """

    name: str
    distance: int | None

    def begin(self, at: PassStart) -> None:
        """Begin a pass. A prediction may follow before its first layer."""
        ...

    def observe(self, routing: LayerRouting) -> None:
        """Observe a layer's routing."""
        ...

    def predict(self, layer: int) -> list[LayerPrediction]:
        """Predict experts after this layer (-1: before the first one of the pass)."""
        ...

    def state(self) -> Mapping[str, NDArray[Any]]:
        """The learned state that may be saved between runs; empty where there is none."""
        ...

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Begin with the state of an earlier run. ValueError where it does not fit this model."""
        ...
