"""eamc: predicts the experts that similar past prompts used (MoE-Infinity, sections 4.3 to 4.5).

An EAM (expert activation matrix) counts the tokens routed to each expert; the collection (EAMC)
contains the EAMs of 100 past prompts. After each layer l the EAM of this pass so far (option
`matching=iteration`, figure 5 of the paper), or of this prompt and its answer so far
(`matching=request`), is compared with the collection. pEAM is the sum of the matched EAMs: those
whose cosine distance is at most the smallest one plus the option `tolerance` (4.5; the paper does
not say which match). In a model of L layers, expert e of a layer i > l has the likelihood

    pEAM[i][e] / sum(pEAM[i]) * (1 - (i - l) / L)

Layers l + 1 .. l + distance are predicted; layer numbers go on into the next pass. Experts are
prefetched in the order of this likelihood, whichever layer they belong to (4.5, figure 5, step 3).
While the collection is empty, the current EAM is used as pEAM.
Prefill and decode have an EAM and a collection each (4.3). An EAM is added to the collection when
the next prompt begins; in a full collection it replaces the nearest one (B.1). The policy in
policies/moe_infinity.py evicts by the same pEAM, with one EAM for prefill and decode.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import numpy as np

from greenroom.core.compiling.compile_cache import jit
from greenroom.core.policy import PolicyOption
from greenroom.core.predictor import Ids, LayerPrediction, LayerRouting, PassStart
from greenroom.core.ranking import top
from greenroom.predictors.helpers.kind import PredictorKind, PredictorSetup
from greenroom.predictors.helpers.learner import Arrays, Floats, as_contiguous, repeat_for_tokens
from greenroom.predictors.helpers.token_table import fill
from greenroom.predictors.none import NullPredictor


class Collection(NamedTuple):
    """Collection of the expert activation matrices (EAMs) of past prompts, and the current one.

    Arrays are for P experts of the model and C matrices, of which the first `size` are in use.
    """

    counts: Ids  # [P, C]
    dots: Ids  # [C] dot products of the matrices with `eam`
    squares: Ids  # [C] squared lengths of the matrices
    size: Ids  # [1]
    request: Ids  # [P] the EAM of this request
    eam: Ids  # [P] the EAM that is compared with the collection

    def reset_eam(self) -> None:
        """Set the current expert activation matrix to zero, with its dot products."""
        self.dots[:] = 0
        self.eam[:] = 0

    def store_request(self) -> None:
        """Add a finished prompt's expert activation matrix, and begin a new one.

        In a full collection it replaces the matrix at the smallest cosine distance. A matrix
        without counts is not added.
        """
        if not self.request.any():
            return
        place = int(self.size[0])
        if place == self.squares.size:
            dots = (self.request @ self.counts).astype(np.float64)
            place = int((dots * dots / self.squares).argmax())
        else:
            self.size[0] += 1
        self.counts[:, place] = self.request
        self.squares[place] = self.request @ self.request
        self.request[:] = 0


def empty_collection(pieces: int, capacity: int) -> Collection:
    """Create an empty collection for `capacity` expert activation matrices.

    `pieces` is the number of experts of the model.
    """
    counts, row = np.zeros((pieces, capacity), np.int64), np.zeros(pieces, np.int64)
    place = np.zeros(capacity, np.int64)
    return Collection(counts, place, place + 1, np.zeros(1, np.int64), row, row.copy())


@jit
def count(collection: Collection, experts: Ids, begin: int) -> None:
    """Count the experts that tokens used in a layer in the current activation matrix.

    experts: ids within the layer, [tokens, top_k]
    begin: the model-wide id of the layer's first expert

    The matrix's dot products with those of the collection are updated.
    """
    for token in range(experts.shape[0]):
        for rank in range(experts.shape[1]):
            piece = begin + experts[token, rank]
            collection.eam[piece] += 1
            collection.request[piece] += 1
            for place in range(collection.size[0]):
                collection.dots[place] += collection.counts[piece, place]


@jit
def score(collection: Collection, begin: Ids, layer: int, tolerance: float, scores: Floats) -> None:
    """Write scores for the next layers' experts, by the most similar past prompts.

    layer: the layer that was routed last; the layers after it are scored
    begin: the model-wide id of each layer's first expert, and the number of experts
    tolerance: by how much a matched EAM's cosine distance may exceed the smallest one
    scores: [distance, experts] likelihoods, as the module's docstring defines them

    Cosines are compared by dot ** 2 / square, which gives the same order.
    """
    layers, size = begin.size - 1, collection.size[0]
    similarity, most = np.empty(size), -1.0
    for place in range(size):
        dot = float(collection.dots[place])
        similarity[place] = dot * dot / float(collection.squares[place])
        most = max(most, similarity[place])
    if tolerance > 0 and size > 0:
        square = 0.0
        for piece in range(collection.eam.size):
            square += float(collection.eam[piece]) ** 2
        most = min(most, max(0.0, sqrt(most) - tolerance * sqrt(square)) ** 2)
    for ahead in range(scores.shape[0]):
        target = (layer + 1 + ahead) % layers
        first, experts = begin[target], begin[target + 1] - begin[target]
        scores[ahead] = 0
        for place in range(size):
            if similarity[place] >= most:
                for expert in range(experts):
                    scores[ahead, expert] += collection.counts[first + expert, place]
        if size == 0:
            for expert in range(experts):
                scores[ahead, expert] = collection.eam[first + expert]
        total = scores[ahead].sum()
        if total > 0:
            scores[ahead] *= np.float32((1 - (ahead + 1) / layers) / total)


class EamcPredictor(NullPredictor):
    """Predictor `eamc`: the experts of the past prompts most similar to the current one."""

    name = "eamc"

    def __init__(self, setup: PredictorSetup) -> None:
        super().__init__(setup)
        self._by_request = setup.options["matching"] == "request"
        self._tolerance = float(setup.options["tolerance"])
        self._begin = np.cumsum([0, *self._shape.experts_per_layer])
        self._parts = {
            part: empty_collection(int(self._begin[-1]), int(setup.options["capacity"]))
            for part in ("prefill", "decode")
        }
        self._collection = self._parts["decode"]
        self._request, self._tokens = -1, 1

    def begin(self, at: PassStart) -> None:
        self._collection = self._parts["prefill" if at.prefill else "decode"]
        if at.request != self._request:
            for part in self._parts.values():
                part.store_request()
                part.reset_eam()
        elif not self._by_request:
            self._collection.reset_eam()
        self._request, self._tokens = at.request, at.tokens

    def observe(self, routing: LayerRouting) -> None:
        count(self._collection, as_contiguous(routing.experts), int(self._begin[routing.layer]))

    def predict(self, layer: int) -> list[LayerPrediction]:
        if layer < 0:
            return []
        scores = np.empty((self._ahead, max(self._shape.experts_per_layer)), np.float32)
        score(self._collection, self._begin, layer, self._tolerance, scores)
        experts = top(scores, self._shape.width, 0.0)
        layers, tokens = self._shape.layers, self._tokens
        return [
            repeat_for_tokens(
                LayerPrediction(layer + 1 + i, experts[i : i + 1], scores[i]), layers, tokens
            )
            for i in range(self._ahead)
        ]

    def state(self) -> Arrays:
        state = {}
        for name, part in self._parts.items():
            state[f"{name}.collection"] = part.counts[:, : part.size[0]].T.copy()
            state[f"{name}.request"] = part.request.copy()
        return state

    def restore(self, state: Arrays) -> None:
        for name, part in self._parts.items():
            key = f"{name}.collection"
            saved = state.get(key, np.empty(0))
            size = part.size[0] = min(len(saved), part.squares.size)
            collection = np.zeros((size, len(part.request)), np.int64)
            fill(key, state, collection)
            fill(f"{name}.request", state, part.request)
            part.counts[:, :size] = collection.T
            part.squares[:size] = (collection * collection).sum(axis=1)
        self._request = -1


eamc = PredictorKind(
    "eamc",
    EamcPredictor,
    "what similar prompts used (MoE-Infinity)",
    distance=2,
    options=(
        PolicyOption(
            "matching",
            "iteration",
            "which EAM is matched with the collection: this pass's, or this request's so far",
            choices=("iteration", "request"),
        ),
        PolicyOption("capacity", 100, "EAMs in each collection", 1, 10_000),
        PolicyOption("tolerance", 0.0, "cosine distance beyond the smallest that matches", 0, 1),
    ),
)
