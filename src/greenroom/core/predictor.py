"""What a predictor is: it is told what happened, and says which experts come next.

A predictor knows no tensors, clocks or slots. Its drivers (a run, a simulation, a recording) call
`begin` when a pass begins, then for every layer `observe` with what the layer's router chose, and
after each of these `predict` for what the predictor expects from there.

Layers are counted on beyond the end of a pass: layer `layers + j` is layer j of the pass that
comes next. So the first layers of a token are predicted from the last layers of the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Inputs = NDArray[np.float32]


class PassStart(NamedTuple):
    """What is known before a pass: T tokens of a request go in.

    `first` is the position of its first token among all tokens since the start (of the run, or of
    the trace), by which predictors that read a trace find their place.
    """

    request: int
    first: int
    tokens: int
    prefill: bool
    token_ids: Ids | None = None  # [T]


class LayerRouting(NamedTuple):
    """What a layer's router chose: T tokens, K experts each, ids within the layer, rank order.

    `inputs` are the hidden states that the router was given, where the predictor asks for them.
    """

    layer: int
    experts: Ids  # [T, K]
    weights: NDArray[np.float32] | None = None  # [T, K]
    inputs: Inputs | None = None  # [T, H]


class LayerPrediction(NamedTuple):
    """Experts that a predictor expects in a layer, likeliest first; ids within the layer.

    One row a token of this pass; one row, where the layer lies in the next pass (that of the token
    that follows the last one). -1 fills rows in which fewer are expected.
    """

    layer: int  # 0 .. 2 * layers - 1: beyond the last, a layer of the next pass
    experts: Ids  # [T or 1, width]


class Shape(NamedTuple):
    """What a predictor must know of a model."""

    experts_per_layer: tuple[int, ...]
    top_k: int

    @property
    def layers(self) -> int:
        return len(self.experts_per_layer)

    @property
    def width(self) -> int:
        """Experts that a guess names: twice those of a token, as far as there are so many."""
        return min(2 * self.top_k, *self.experts_per_layer)


class Gates(Protocol):
    """The routers of a model, asked out of turn."""

    def rank(self, layer: int, inputs: Inputs, width: int) -> Ids:
        """The experts that a layer's router would choose, likeliest first: [T, H] -> [T, width]."""
        ...


class Predictor(Protocol):
    """One predictor of one model, while it runs.

    `distance` is how many layers ahead `predict` looks, None where it is free to look at any.
    """

    name: str
    distance: int | None

    def begin(self, at: PassStart) -> None:
        """A pass begins. A prediction may follow before its first layer."""
        ...

    def observe(self, seen: LayerRouting) -> None:
        """A layer's routing is known."""
        ...

    def predict(self, layer: int) -> list[LayerPrediction]:
        """What is expected after this layer (-1: before the first one of the pass)."""
        ...

    def state(self) -> Mapping[str, NDArray[Any]]:
        """What was learned and is worth keeping, as plain arrays; empty where there is nothing."""
        ...

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Begin with what an earlier run learned. ValueError where it does not fit this model."""
        ...
