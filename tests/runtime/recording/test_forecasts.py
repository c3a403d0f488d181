"""Predictions recorded during a run equal those of a replay of its trace."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.core.predictor import LayerRouting
from greenroom.errors import UnknownName, UsageError
from greenroom.predictors import PREDICTORS, PredictorSetup, predictor
from greenroom.runtime.recording.forecasts import ForecastRecorder, parse_predictors
from tests.predictors.replay import passes, replay
from tests.predictors.small import SHAPE, routing

STANDALONE = [name for name, kind in PREDICTORS.items() if not kind.needs - {"token_ids"}]
AHEAD = [f"{name}:{d}" for name in STANDALONE if PREDICTORS[name].distance for d in (2, 3)]


@pytest.mark.parametrize("seed", range(3))
def test_forecasts_equal_those_of_a_replay(seed: int) -> None:
    trace = routing(seed)
    names = [*STANDALONE, *AHEAD]
    predictors = {name: predictor(name).build(PredictorSetup(SHAPE)) for name in names}
    forecasts = ForecastRecorder(predictors, SHAPE)
    predicted: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for at in passes(trace):
        forecasts.begin(at)
        for layer in range(SHAPE.layers):
            inside = trace.experts[at.first : at.first + at.tokens, layer].astype(np.int64)
            forecasts.layer(LayerRouting(layer, inside))
        for name, rows in forecasts.end().items():
            predicted[name].append(rows)
    for name in names:
        expected = replay(predictor(name).build(PredictorSetup(SHAPE)), trace, SHAPE).experts
        recorded = np.concatenate(predicted[name])
        np.testing.assert_array_equal(np.where(recorded < 0, 255, recorded), expected, name)
        assert name not in ("token", "markov", "markov:3") or (expected[20:] != 255).any()


def test_a_list_of_names_keeps_the_commas_of_options() -> None:
    text = "markov:2,next-gate,popularity:1,half-life=4,token,popularity:half-life=8"
    assert [choice.name for choice in parse_predictors(text)] == [
        *("markov:2", "next-gate", "popularity:1,half-life=4", "token", "popularity:half-life=8")
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("markov,markov", "names a predictor twice"),
        ("markov,oracle", "predictor oracle works in replays of a trace only"),
        ("auto", "predictor auto works in replays of a trace only"),
        ("markov:x", "must be a number of layers"),
        ("popularity:1,half-life=0", "half-life"),
    ],
)
def test_predictors_that_need_a_replay_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_predictors(text)


@pytest.mark.parametrize("text", ["", "markov,", "next-gates"])
def test_unknown_predictors_are_refused(text: str) -> None:
    with pytest.raises(UnknownName, match="next-gate"):
        parse_predictors(text)
