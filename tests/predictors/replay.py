"""Run a predictor over a trace's arrays; collect its predictions and their accuracy.

The predictor learns as it goes, as it would in a run. Accuracy is the share of the experts used
that were among the top-k predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from greenroom.core.predictor import LayerPrediction, LayerRouting, PassStart, Predictor, Shape

Ints = NDArray[np.int64]


class Routing(NamedTuple):
    """A trace's arrays: N tokens, P passes, R requests."""

    experts: NDArray[Any]  # [N, layers, top_k]
    pass_starts: Ints  # [P + 1] token offsets
    pass_prefill: NDArray[np.bool_]  # [P]
    request_starts: Ints  # [R + 1] token offsets
    token_ids: NDArray[np.int32] | None = None  # [N]


class Predicted(NamedTuple):
    """Predictions as a trace holds them."""

    experts: NDArray[Any]  # [N, layers, width] uint8 or uint16, the largest of the type: nothing
    distance: int  # 0: before the pass began


def passes(routing: Routing) -> Iterator[PassStart]:
    """Yield the start of each pass of a trace."""
    starts = routing.pass_starts
    request = np.searchsorted(routing.request_starts, starts[:-1], side="right") - 1
    for i, first in enumerate(starts[:-1].tolist()):
        tokens = int(starts[i + 1]) - first
        ids = None
        if routing.token_ids is not None:
            ids = routing.token_ids[first : first + tokens].astype(np.int64)
        yield PassStart(int(request[i]), first, tokens, bool(routing.pass_prefill[i]), ids)


def replay(predictor: Predictor, routing: Routing, shape: Shape) -> Predicted:
    """Collect a predictor's predictions for each layer, made at least its distance before.

    Of several such predictions for a layer the last one counts. Those made when a pass begins count
    if the predictor has no distance, in the first pass, and in passes of several tokens: of these
    only the first token can be predicted in the pass before.
    """
    tokens, layers, _ = routing.experts.shape
    kind = np.uint8 if max(shape.experts_per_layer) <= 255 else np.uint16
    nothing = int(np.iinfo(kind).max)
    predicted = np.full((tokens, layers, shape.width), nothing, kind)
    distance = predictor.distance or 0
    for at in passes(routing):
        announced = at.first == 0 or at.tokens > 1
        predictor.begin(at)
        for layer in range(-1, layers):
            if layer >= 0:
                inside = routing.experts[at.first : at.first + at.tokens, layer]
                predictor.observe(LayerRouting(layer, inside.astype(np.int64)))
            for prediction in predictor.predict(layer):
                in_time = announced if layer < 0 else prediction.layer - layer >= distance
                if in_time or not distance:
                    _write(predicted, prediction, at, nothing)
    return Predicted(predicted, distance)


def _write(
    predicted: NDArray[Any], prediction: LayerPrediction, at: PassStart, nothing: int
) -> None:
    layers, most = predicted.shape[1:]
    ids = prediction.experts[:, :most]
    first = at.first if prediction.layer < layers else at.first + at.tokens
    if first < len(predicted):
        rows = predicted[first : first + len(ids), prediction.layer % layers]
        rows[:, : ids.shape[1]] = np.where(ids < 0, nothing, ids)
        rows[:, ids.shape[1] :] = nothing


def accuracy(predicted: NDArray[Any], experts: NDArray[Any], since: int = 0) -> NDArray[np.float64]:
    """[layers] share of the experts used that were among the top-k predicted, from token `since`.

    `predicted` [tokens, layers, width] as a trace holds it; `experts` [tokens, layers, top_k].
    """
    top_k = experts.shape[2]
    hits = np.zeros(experts.shape[1], np.int64)
    nothing = np.iinfo(predicted.dtype).max
    for rank in range(min(top_k, predicted.shape[2])):
        prediction = predicted[since:, :, rank, None]
        hits += ((prediction == experts[since:]) & (prediction != nothing)).sum(axis=(0, 2))
    shares: NDArray[np.float64] = hits / max(1, (len(experts) - since) * top_k)
    return shares
