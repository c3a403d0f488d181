"""The interface of predictors: they observe routing and predict which experts come next.

A predictor has no tensors, clocks or slots. Its callers (a run, a simulation, a recording) call
`begin` when a pass begins. For every layer they call `observe` with the choices of the layer's
router, and then `predict` for the layers ahead.

The numbers of layers continue beyond the end of a pass: layer `layers + j` is layer j of the next
pass. So the first layers of a token are predicted from the last layers of the token before.
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

    request:   the index of the request (a prompt with its answer) that the pass belongs to
    first:     the position of its first token among all tokens since the start of the run or of the
               trace; predictors that read a trace find their place by it
    tokens:    the number of tokens
    prefill:   the pass reads (a block of) a prompt
    token_ids: the ids of the tokens, [tokens], or None
    variants:  the variant of each token, [tokens], or [1] of all; None: the model has none
    """

    request: int
    first: int
    tokens: int
    prefill: bool
    token_ids: Ids | None = None  # [T]
    variants: Ids | None = None  # [T] or [1]


class LayerRouting(NamedTuple):
    """The experts that a layer's router chose for each token, in rank order.

    experts: K experts for each of T tokens, [T, K]; ids are within the layer
    weights: their gate weights, [T, K], or None
    inputs:  the hidden states that entered the router, [T, hidden size], if the predictor needs
             them and predicts after this layer
    """

    layer: int
    experts: Ids  # [T, K]
    weights: NDArray[np.float32] | None = None  # [T, K]
    inputs: Inputs | None = None  # [T, H]


class LayerPrediction(NamedTuple):
    """The experts that a predictor expects in a layer, likeliest first.

    layer:   from 0 to 2 * layers - 1; numbers from `layers` on are layers of the next pass
    experts: ids within the layer, [T, width] for the T tokens of this pass, or [1, width] for the
             first token of the next pass; -1 fills rows in which fewer experts are expected
    priorities: the prefetch priority of each of the layer's experts, [experts]; None: experts of
             nearer layers are prefetched first
    """

    layer: int  # 0 .. 2 * layers - 1: beyond the last, a layer of the next pass
    experts: Ids  # [T or 1, width]
    priorities: NDArray[np.floating[Any]] | None = None  # [experts of the layer]


class Shape(NamedTuple):
    """The shape of a model's routing: its layers, experts and choices per token."""

    experts_per_layer: tuple[int, ...]
    top_k: int

    @property
    def layers(self) -> int:
        return len(self.experts_per_layer)

    @property
    def width(self) -> int:
        """Return how many experts a prediction contains: twice a token's number of experts.

        The result is at most the number of experts of the smallest layer.
        """
        return min(2 * self.top_k, *self.experts_per_layer)


class Gates(Protocol):
    """A model's routers (expert gates), callable outside of a forward pass."""

    def rank(self, layer: int, inputs: Inputs, width: int) -> Ids:
        """Rank the experts that a layer's router would choose, likeliest first.

        `inputs` are hidden states [T, hidden size]; returns ids within the layer, [T, width].
        """
        ...


class Predictor(Protocol):
    """Interface of predictors of which experts a model's next layers choose.

    `distance` is how many layers ahead `predict` looks; None if it may predict any layer. `width`
    is how many experts it names for a token at most. `costly` predictors run in a thread
    of their own by default if a GPU computes the experts.
    """

    name: str
    costly: bool
    distance: int | None
    width: int

    def begin(self, at: PassStart) -> None:
        """Begin a forward pass in an expert predictor.

        `predict(-1)` may follow before the pass's first layer.
        """
        ...

    def observe(self, routing: LayerRouting) -> None:
        """Observe which experts a layer's router has chosen."""
        ...

    def predict(self, layer: int) -> list[LayerPrediction]:
        """Predict the experts of the layers that follow a given layer.

        Layer -1 stands for the start of the pass.
        """
        ...

    def state(self) -> Mapping[str, NDArray[Any]]:
        """Return a predictor's learned state, to be saved between runs; empty if it has none."""
        ...

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore a predictor's learned state from an earlier run.

        ValueError if the state does not fit this model.
        """
        ...
