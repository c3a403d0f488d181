"""The compiled predictors against the plain ones of reference.py, on random routing."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.predictors import PredictorSetup, predictor
from greenroom.predictors.helpers import token_table
from greenroom.predictors.helpers.token_table import TokenTable
from tests.predictors.reference import PlainEamc, PlainMarkov, PlainPath
from tests.predictors.small import SHAPE, routing, said

FEW = settings(max_examples=15, deadline=None)  # the first example compiles
SEEDS = st.integers(0, 2**32 - 1)


def ranks(named: list[int], scores: np.ndarray, above: float = -np.inf) -> bool:
    """Whether these are the experts with the highest scores, the highest first."""
    there = [e for e in named if e >= 0]
    if any(e >= len(scores) or not scores[e] > above for e in there):
        return False
    rest = np.delete(scores, there)
    falling = all(scores[a] >= scores[b] - 1e-5 for a, b in pairwise(there))
    if len(there) < len(named):
        return falling and not (rest > above).any()
    return falling and (not rest.size or rest.max() <= scores[there[-1]] + 1e-5)


@pytest.mark.parametrize("distance", [1, 2, 3])
@given(seed=SEEDS)
@FEW
def test_markov(distance, seed):
    trace = routing(seed)
    plain = PlainMarkov(SHAPE, distance)
    for at, layer, guesses in said(
        predictor(f"markov:{distance}").build(PredictorSetup(SHAPE)), trace
    ):
        if layer < 0:
            assert guesses == []
            continue
        rows = trace.experts[at.first : at.first + at.tokens, layer].tolist()
        plain.observe(at, layer, rows)
        (guess,) = guesses
        assert guess.layer == layer + distance
        seen = rows if guess.layer < SHAPE.layers else rows[-1:]
        for named, row in zip(guess.experts.tolist(), seen, strict=True):
            assert ranks(named, plain.scores(layer, row))


@pytest.mark.parametrize("matching", ["iteration", "request"])
@given(seed=SEEDS, distance=st.integers(1, 3), capacity=st.integers(1, 4))
@FEW
def test_eamc(matching, seed, distance, capacity):
    trace = routing(seed, requests=7)
    plain = PlainEamc(SHAPE, capacity, matching == "request")
    text = f"eamc:{distance},matching={matching},capacity={capacity}"
    for at, layer, guesses in said(predictor(text).build(PredictorSetup(SHAPE)), trace):
        if layer < 0:
            plain.begin(at)
            continue
        rows = trace.experts[at.first : at.first + at.tokens, layer].tolist()
        plain.observe(at, layer, rows)
        assert sorted(g.layer for g in guesses) == list(range(layer + 1, layer + distance + 1))
        best = [plain.scores(at, layer, g.layer).max() for g in guesses]
        assert best == pytest.approx(sorted(best, reverse=True))
        for guess in guesses:
            scores = plain.scores(at, layer, guess.layer)
            assert all(ranks(named, scores, 0.0) for named in guess.experts.tolist())


@pytest.mark.parametrize("distance", [1, 2, 3])
@given(seed=SEEDS)
@FEW
def test_routing_path(distance, seed):
    trace = routing(seed)
    plain = PlainPath(SHAPE, distance)
    it = predictor(f"routing-path:{distance}").build(PredictorSetup(SHAPE))
    for at, layer, guesses in said(it, trace):
        if layer < 0:
            plain.begin(at)
            assert [g.layer for g in guesses] == [0, 1, 2]
        else:
            rows = trace.experts[at.first : at.first + at.tokens, layer].tolist()
            plain.observe(at, layer, rows)
            assert [g.layer for g in guesses] == [layer + distance]
        for guess in guesses:
            beyond, target = divmod(guess.layer, SHAPE.layers)
            first = at.first + at.tokens * beyond
            corrected = layer >= 0 or target < distance
            for i, named in enumerate(guess.experts.tolist()):
                assert ranks(named, plain.logits(first + i, target, corrected))


@given(ids=st.lists(st.integers(0, 9), max_size=60))
@settings(max_examples=60, deadline=None)
def test_places_are_those_of_the_ids_met_last(ids):
    """Passes of one token, against a list of three ids in the order of their last meeting."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_table, "MOST_IDS", 3)
        held = TokenTable((1,), np.int64)
    met: list[int] = []
    for id_ in ids:
        (place,) = held.of(np.array([id_]), 1).tolist()
        assert held.rows[place, 0] == (id_ + 1 if id_ in met else 0)
        held.rows[place, 0] = id_ + 1
        met = [*(other for other in met if other != id_), id_][-3:]
    state = held.state()
    assert sorted(state["ids"].tolist()) == sorted(met)
    assert (state["rows"][:, 0] == state["ids"] + 1).all()
