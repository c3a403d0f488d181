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
    """The start of a forward pass over tokens of one request, for expert predictors.

    T tokens.

    `first` is the position of its first token among all tokens since the start of the run or of
    the trace, by which predictors that read a trace find their place.
    """

    request: int
    first: int
    tokens: int
    prefill: bool
    token_ids: Ids | None = None  # [T]


class LayerRouting(NamedTuple):
    """The experts that a layer's router chose for each token, in rank order.

    K experts of T tokens; ids are within the layer.

    `inputs` are the hidden states that entered the router, where the predictor needs them.
    """

    layer: int
    experts: Ids  # [T, K]
    weights: NDArray[np.float32] | None = None  # [T, K]
    inputs: Inputs | None = None  # [T, H]


class LayerPrediction(NamedTuple):
    """The experts that a predictor expects in a layer, likeliest first.

    Ids are within the layer.

    There is one row a token of this pass; or a single row where the layer is in the next pass, for
    its first token. -1 fills rows in which fewer experts are expected.
    """

    layer: int  # 0 .. 2 * layers - 1: beyond the last, a layer of the next pass
    experts: Ids  # [T or 1, width]


class Shape(NamedTuple):
    """The shape of a model's routing: its layers, experts and choices per token."""

    experts_per_layer: tuple[int, ...]
    top_k: int

    @property
    def layers(self) -> int:
        return len(self.experts_per_layer)

    @property
    def width(self) -> int:
        """Return how many experts a prediction contains: twice a token's top-k, where available.

        At most all of the smallest layer.
        """
        return min(2 * self.top_k, *self.experts_per_layer)


class Gates(Protocol):
    """A model's routers (expert gates), callable outside of a forward pass."""

    def rank(self, layer: int, inputs: Inputs, width: int) -> Ids:
        """Rank the experts that a layer's router would choose, likeliest first.

        [T, H] -> [T, width].
        """
        ...


class Predictor(Protocol):
    """Interface of predictors of which experts a model's next layers choose.

    `distance` is how many layers ahead `predict` looks; None where it may predict any layer.
    """

    name: str
    distance: int | None

    def begin(self, at: PassStart) -> None:
        """Begin a forward pass in an expert predictor.

        A prediction may follow before its first layer.
        """
        ...

    def observe(self, routing: LayerRouting) -> None:
        """Observe which experts a layer's router has chosen."""
        ...

    def predict(self, layer: int) -> list[LayerPrediction]:
        """Predict the experts of the layers that follow a given layer.

        -1: before the first layer of the pass.
        """
        ...

    def state(self) -> Mapping[str, NDArray[Any]]:
        """Return a predictor's learned state, to be saved between runs.

        Empty where there is none.
        """
        ...

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore a predictor's learned state from an earlier run.

        ValueError where it does not fit this model.
        """
        ...
