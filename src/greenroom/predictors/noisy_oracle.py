"""noisy-oracle: predicts the true experts with random errors, at any chosen accuracy.

It serves to study prefetching. Each expert that will be used is predicted with the probability
`accuracy`. Otherwise another expert of the layer replaces it, drawn uniformly from those that the
token does not use and that are not predicted yet (-1 if there are no more). So the expected
accuracy is the chosen one, at every distance and in every layer. With `like=next-gate` or
`like=learned` each layer has the accuracy that this predictor has on the demo model at the same
distance and relative depth (`helpers/measured.py`); a token's first layers are predicted where the
predictor does so, in the token before or at layer 0.

The default accuracy is that of ProMoE at the distance d (sections 4.2 and 4.3, figure 8a, with
DeepSeek-V2-Lite). The paper's text gives, as means over all layers, 90.5 % at d = 1 and 54.5 % at
d = 8 for skip-based prediction (later routers applied to earlier inputs), and 54 % for prediction
by the token's id. For other d we use 0.905 * (0.545 / 0.905) ** ((d - 1) / 7), and at least 54 %,
since the paper says that skip-based prediction falls below prediction by the token's id. The
figure's curve of the learned predictor is higher, but the text gives no number for it: use the
option `accuracy=`.

With `width=all` all other experts of the layer follow, in random order. An expert that is used and
that was not predicted is among them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.compiling.compile_cache import jit
from greenroom.core.policy import PolicyOption
from greenroom.core.predictor import Ids
from greenroom.errors import UsageError
from greenroom.predictors.helpers.kind import ALL, WIDTH, PredictorKind, PredictorSetup
from greenroom.predictors.helpers.measured import MEASURED, measured_accuracy
from greenroom.predictors.learned import learned
from greenroom.predictors.oracle import NO_ID, true_routing
from greenroom.predictors.recorded import ReplayPredictor, ReplayWithinToken

BLOCK = 1024  # tokens that are ranked at a time
NEAR, FAR, TOKEN = 0.905, 0.545, 0.54  # d = 1, d = 8, and where only the token's id helps


def promoe_accuracy(distance: int) -> float:
    """Return the accuracy of skip-based expert prediction at a distance, by ProMoE's figure 8a.

    Values between the published ones are interpolated; the result is at least 0.54.
    """
    between: float = NEAR * (FAR / NEAR) ** ((distance - 1) / 7)
    return max(between, TOKEN)


@jit
def add_errors(
    truth: NDArray[Any], sizes: Ids, accuracy: NDArray[Any], seed: int, predicted: Any
) -> None:
    """Write the experts of a trace with random errors, as predictions of a given accuracy.

    truth, predicted: [tokens, layers, top_k] expert ids; in `predicted`, -1 means none
    sizes: [layers] number of experts of each layer
    accuracy: [layers] probability that an expert is predicted
    """
    np.random.seed(seed)
    tokens, layers, top_k = truth.shape
    used = np.zeros(sizes.max(), np.bool_)
    for token in range(tokens):
        for layer in range(layers):
            used[:] = False
            for rank in range(top_k):
                used[truth[token, layer, rank]] = True
            free = sizes[layer] - top_k
            for rank in range(top_k):
                expert = int(truth[token, layer, rank])
                if np.random.random() >= accuracy[layer]:
                    expert = -1
                    if free > 0:
                        left = np.random.randint(free)  # skip so many unused experts
                        while left >= 0:
                            expert += 1
                            left -= not used[expert]
                        used[expert] = True
                        free -= 1
                predicted[token, layer, rank] = expert


def rank_all(predicted: NDArray[np.int16], sizes: Ids, seed: int) -> NDArray[np.int16]:
    """Extend predictions to rankings of all experts, the others in random order.

    predicted: [tokens, layers, top_k] expert ids, -1 for none
    sizes:     [layers] number of experts of each layer

    Returns [tokens, layers, experts of the largest layer]; -1 ends the rows of smaller layers.
    """
    most, random = int(sizes.max()), np.random.default_rng(seed)
    ranked = np.empty((*predicted.shape[:2], most), np.int16)
    missing = np.arange(most) >= sizes[:, None]
    for begin in range(0, len(predicted), BLOCK):
        ids = predicted[begin : begin + BLOCK].astype(np.int64)
        keys = random.random((*ids.shape[:2], most + 1))
        keys[..., :most][:, missing] = 2.0
        order = np.broadcast_to(np.arange(ids.shape[2]) - float(ids.shape[2]), ids.shape)
        np.put_along_axis(keys, np.where(ids < 0, most, ids), order, axis=2)
        keys[..., most] = 3.0
        rows = np.argsort(keys, axis=2)[..., :most]
        rows[np.take_along_axis(keys, rows, axis=2) >= 2] = -1
        ranked[begin : begin + BLOCK] = rows
    return ranked


def build(setup: PredictorSetup) -> ReplayPredictor:
    """Build the predictor `noisy-oracle`.

    UsageError if the setup has no trace, if the options `accuracy` and `like` are both given, or if
    the accuracy of `like` was not measured at this distance.
    """
    routed = true_routing(setup, "noisy-oracle")
    chosen, like = float(setup.options["accuracy"]), str(setup.options["like"])
    if like and chosen != PAPER:
        raise UsageError(
            f"predictor noisy-oracle has accuracy={chosen:g} and like={like}, but each of"
            " these options sets the accuracy: give one of them"
        )
    layers = setup.shape.layers
    if like:
        accuracy = measured_accuracy(like, setup.ahead, layers)
    else:
        accuracy = np.full(layers, promoe_accuracy(setup.ahead) if chosen == PAPER else chosen)
    predicted = np.empty(routed.shape, np.int16)
    sizes = np.array(setup.shape.experts_per_layer, np.int64)
    add_errors(np.ascontiguousarray(routed), sizes, accuracy, setup.seed, predicted)
    if setup.options[WIDTH.name] == ALL:
        predicted = rank_all(predicted, sizes, setup.seed)
    replay = ReplayWithinToken if like == learned.name else ReplayPredictor
    return replay("noisy-oracle", predicted, NO_ID, setup)


PAPER = -1.0
noisy_oracle = PredictorKind(
    "noisy-oracle",
    build,
    "the experts that will be used, with errors",
    frozenset({"trace"}),
    distance=1,
    options=(
        PolicyOption(
            "accuracy", PAPER, "share of right predictions; -1: that of ProMoE's figure 8a", -1, 1
        ),
        WIDTH,
        PolicyOption(
            "like", "", "have the measured accuracy of this predictor", choices=("", *MEASURED)
        ),
    ),
)
