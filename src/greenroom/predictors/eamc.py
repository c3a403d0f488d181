"""eamc: what similar prompts used (MoE-Infinity, sections 4.3 to 4.5; B.1 for a full collection).

An EAM (expert activation matrix) counts the tokens that went to each expert; the collection (EAMC)
keeps those of past prompts, 100 of them. After each layer l the EAM of this pass so far
(`iteration`, figure 5 of the paper), or of this request so far (`request`), is matched with the
collection; pEAM is the sum of those at the smallest cosine distance, and the likelihood of expert e
of layer i ahead is

    pEAM[i][e] / sum(pEAM[i]) * (1 - (i - l) / L)

Layers l + 1 .. l + distance are predicted, those that hold the likeliest expert first. The layers
are counted on into the next pass. While the collection is empty, the EAM that would be matched
stands for pEAM. Prompts and answers (prefill and decode, 4.3) have an EAM and a collection each; an
EAM enters when the next request begins, into a full collection in place of its nearest. So far
policies/moe_infinity.py, which evicts by the same pEAM; there, a request has one EAM.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.compiling.compile_cache import jit
from greenroom.core.policy import PolicyOption
from greenroom.core.predictor import Ids, LayerPrediction, LayerRouting, PassStart
from greenroom.core.ranking import top
from greenroom.predictors.helpers.kind import PredictorKind, PredictorSetup
from greenroom.predictors.helpers.learner import Arrays, Floats, as_ids, for_all
from greenroom.predictors.helpers.token_table import filled
from greenroom.predictors.none import NullPredictor


class Collection(NamedTuple):
    """The EAMs of past prompts, or answers: C places, of which `size` are taken; and the one that
    is growing. P experts."""

    counts: Ids  # [P, C]
    dots: Ids  # [C] products with the EAM that is matched
    squares: Ids  # [C]
    size: Ids  # [1]
    whole: Ids  # [P] the EAM of this request
    eam: Ids  # [P] the one that is matched

    def forget(self) -> None:
        """The EAM that is matched begins anew."""
        self.dots[:] = 0
        self.eam[:] = 0

    def keep(self) -> None:
        """The request is over: its EAM enters."""
        if not self.whole.any():
            return
        place = int(self.size[0])
        if place == self.squares.size:
            dots = (self.whole @ self.counts).astype(np.float64)
            place = int((dots * dots / self.squares).argmax())
        else:
            self.size[0] += 1
        self.counts[:, place] = self.whole
        self.squares[place] = self.whole @ self.whole
        self.whole[:] = 0


def empty(pieces: int, capacity: int) -> Collection:
    """A collection with nothing in it."""
    counts, row = np.zeros((pieces, capacity), np.int64), np.zeros(pieces, np.int64)
    place = np.zeros(capacity, np.int64)
    return Collection(counts, place, place + 1, np.zeros(1, np.int64), row, row.copy())


@jit
def add(now: Collection, experts: Ids, begin: int) -> None:
    """Tokens used `experts` [T, K] of the layer whose pieces begin there."""
    for token in range(experts.shape[0]):
        for rank in range(experts.shape[1]):
            piece = begin + experts[token, rank]
            now.eam[piece] += 1
            now.whole[piece] += 1
            for place in range(now.size[0]):
                now.dots[place] += now.counts[piece, place]


@jit
def expect(now: Collection, begin: Ids, layer: int, scores: Floats) -> None:
    """`scores` [distance, E]: the likelihoods of the layers after `layer`, under pEAM.

    The cosine ranks as dot ** 2 / square does, and is equal where that is.
    """
    layers, size = begin.size - 1, now.size[0]
    like, most = np.empty(size), -1.0
    for place in range(size):
        dot = float(now.dots[place])
        like[place] = dot * dot / float(now.squares[place])
        most = max(most, like[place])
    for ahead in range(scores.shape[0]):
        target = (layer + 1 + ahead) % layers
        first, experts = begin[target], begin[target + 1] - begin[target]
        scores[ahead] = 0
        for place in range(size):
            if like[place] == most:
                for expert in range(experts):
                    scores[ahead, expert] += now.counts[first + expert, place]
        if size == 0:
            for expert in range(experts):
                scores[ahead, expert] = now.eam[first + expert]
        total = scores[ahead].sum()
        if total > 0:
            scores[ahead] *= np.float32((1 - (ahead + 1) / layers) / total)


class Eamc(NullPredictor):
    name = "eamc"

    def __init__(self, setting: PredictorSetup) -> None:
        super().__init__(setting)
        self._by_request = setting.options["matching"] == "request"
        self._begin = np.cumsum([0, *self._shape.experts_per_layer])
        self._parts = {
            part: empty(int(self._begin[-1]), int(setting.options["capacity"]))
            for part in ("prefill", "decode")
        }
        self._now = self._parts["decode"]
        self._request, self._tokens = -1, 1

    def begin(self, at: PassStart) -> None:
        self._now = self._parts["prefill" if at.prefill else "decode"]
        if at.request != self._request:
            for part in self._parts.values():
                part.keep()
                part.forget()
        elif not self._by_request:
            self._now.forget()
        self._request, self._tokens = at.request, at.tokens

    def observe(self, seen: LayerRouting) -> None:
        add(self._now, as_ids(seen.experts), int(self._begin[seen.layer]))

    def predict(self, layer: int) -> list[LayerPrediction]:
        if layer < 0:
            return []
        scores = np.empty((self._ahead, max(self._shape.experts_per_layer)), np.float32)
        expect(self._now, self._begin, layer, scores)
        named = top(scores, self._shape.width, 0.0)
        order = np.argsort(-scores.max(axis=1), kind="stable") if self._ahead > 1 else (0,)
        return [
            for_all(
                LayerPrediction(layer + 1 + i, named[i : i + 1]), self._shape.layers, self._tokens
            )
            for i in map(int, order)
        ]

    def state(self) -> Arrays:
        kept = {}
        for name, part in self._parts.items():
            kept[f"{name}.collection"] = part.counts[:, : part.size[0]].T.copy()
            kept[f"{name}.request"] = part.whole.copy()
        return kept

    def restore(self, state: Arrays) -> None:
        for name, part in self._parts.items():
            key = f"{name}.collection"
            saved = state.get(key, np.empty(0))
            size = part.size[0] = min(len(saved), part.squares.size)
            collection = np.zeros((size, len(part.whole)), np.int64)
            filled(key, state, collection)
            filled(f"{name}.request", state, part.whole)
            part.counts[:, :size] = collection.T
            part.squares[:size] = (collection * collection).sum(axis=1)
        self._request = -1


eamc = PredictorKind(
    "eamc",
    Eamc,
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
    ),
)
