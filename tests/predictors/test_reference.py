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
from tests.predictors.small import SHAPE, routing, run_predictor

FEW = settings(max_examples=15, deadline=None)  # the first example compiles
SEEDS = st.integers(0, 2**32 - 1)


def ranks_highest(ids_of_row: list[int], scores: np.ndarray, above: float = -np.inf) -> bool:
    """Check that these are the experts with the highest scores, in descending order."""
    experts = [e for e in ids_of_row if e >= 0]
    if any(e >= len(scores) or not scores[e] > above for e in experts):
        return False
    others = np.delete(scores, experts)
    falling = all(scores[a] >= scores[b] - 1e-5 for a, b in pairwise(experts))
    if len(experts) < len(ids_of_row):
        return falling and not (others > above).any()
    return falling and (not others.size or others.max() <= scores[experts[-1]] + 1e-5)


@pytest.mark.parametrize("distance", [1, 2, 3])
@given(seed=SEEDS)
@FEW
def test_markov_predicts_by_the_plain_scores(distance, seed):
    trace = routing(seed)
    plain = PlainMarkov(SHAPE, distance)
    for at, layer, predictions in run_predictor(
        predictor(f"markov:{distance}").build(PredictorSetup(SHAPE)), trace
    ):
        if layer < 0:
            assert predictions == []
            continue
        rows = trace.experts[at.first : at.first + at.tokens, layer].tolist()
        plain.observe(at, layer, rows)
        (prediction,) = predictions
        assert prediction.layer == layer + distance
        used = rows if prediction.layer < SHAPE.layers else rows[-1:]
        for ids_of_row, row in zip(prediction.experts.tolist(), used, strict=True):
            assert ranks_highest(ids_of_row, plain.scores(layer, row))


@pytest.mark.parametrize("matching", ["iteration", "request"])
@pytest.mark.parametrize("tolerance", [0.0, 0.137])
@given(seed=SEEDS, distance=st.integers(1, 3), capacity=st.integers(1, 4))
@FEW
def test_eamc_predicts_by_the_plain_scores(matching, tolerance, seed, distance, capacity):
    trace = routing(seed, requests=7)
    plain = PlainEamc(SHAPE, capacity, matching == "request", tolerance)
    text = f"eamc:{distance},matching={matching},capacity={capacity},tolerance={tolerance}"
    for at, layer, predictions in run_predictor(
        predictor(text).build(PredictorSetup(SHAPE)), trace
    ):
        if layer < 0:
            plain.begin(at)
            continue
        rows = trace.experts[at.first : at.first + at.tokens, layer].tolist()
        plain.observe(at, layer, rows)
        assert [g.layer for g in predictions] == list(range(layer + 1, layer + distance + 1))
        for prediction in predictions:
            scores = plain.scores(at, layer, prediction.layer)
            assert prediction.priorities == pytest.approx(scores)
            assert all(
                ranks_highest(ids_of_row, scores, 0.0) for ids_of_row in prediction.experts.tolist()
            )


@pytest.mark.parametrize("distance", [1, 2, 3])
@given(seed=SEEDS)
@FEW
def test_routing_path_predicts_by_the_plain_scores(distance, seed):
    trace = routing(seed)
    plain = PlainPath(SHAPE, distance)
    tested = predictor(f"routing-path:{distance}").build(PredictorSetup(SHAPE))
    for at, layer, predictions in run_predictor(tested, trace):
        if layer < 0:
            plain.begin(at)
            assert [g.layer for g in predictions] == [0, 1, 2]
        else:
            rows = trace.experts[at.first : at.first + at.tokens, layer].tolist()
            plain.observe(at, layer, rows)
            assert [g.layer for g in predictions] == [layer + distance]
        for prediction in predictions:
            beyond, target = divmod(prediction.layer, SHAPE.layers)
            first = at.first + at.tokens * beyond
            corrected = layer >= 0 or target < distance
            for i, ids_of_row in enumerate(prediction.experts.tolist()):
                assert ranks_highest(ids_of_row, plain.logits(first + i, target, corrected))


@given(ids=st.lists(st.integers(0, 9), max_size=60))
@settings(max_examples=60, deadline=None)
def test_the_token_table_contains_the_most_recent_ids(ids):
    """A table of three rows is compared with a list of ids in the order of last use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_table, "MOST_IDS", 3)
        table = TokenTable((1,), np.int64)
    recent: list[int] = []
    for id_ in ids:
        (place,) = table.of(np.array([id_]), 1).tolist()
        assert table.rows[place, 0] == (id_ + 1 if id_ in recent else 0)
        table.rows[place, 0] = id_ + 1
        recent = [*(other for other in recent if other != id_), id_][-3:]
    state = table.state()
    assert sorted(state["ids"].tolist()) == sorted(recent)
    assert (state["rows"][:, 0] == state["ids"] + 1).all()
