"""Names, distances and options of predictors."""

from __future__ import annotations

import pytest

from greenroom.core.predictor import Shape
from greenroom.errors import UnknownName, UsageError
from greenroom.predictors import AUTO, PREDICTORS, PredictorSetup, predictor
from tests.predictors.small import SHAPE


def test_the_table_has_every_predictor_by_its_name():
    assert {
        *("none", "popularity", "token", "markov", "eamc", "routing-path"),
        *("recorded", "oracle", "noisy-oracle", "pregated"),
    } <= set(PREDICTORS)
    assert all(kind.name == name and kind.help for name, kind in PREDICTORS.items())
    assert predictor("off").kind is predictor("none").kind is PREDICTORS["none"]


def test_auto_cannot_be_built():
    assert predictor("auto").kind is AUTO
    with pytest.raises(UsageError, match="works with a model or a trace only"):
        predictor("auto").build(PredictorSetup(SHAPE))


def test_distance_and_options_follow_the_name():
    assert (predictor("markov").distance, predictor("markov").name) == (1, "markov")
    assert (predictor("markov:12").distance, predictor("markov:12").name) == (12, "markov:12")
    assert predictor("token").distance is None
    noisy = predictor("noisy-oracle:4,accuracy=0.7")
    assert (noisy.distance, noisy.options) == (
        4,
        {"accuracy": 0.7, "width": "twice", "like": ""},
    )
    assert predictor("noisy-oracle:accuracy=0.7").distance == 1
    assert predictor("noisy-oracle").options == {
        "accuracy": -1.0,
        "width": "twice",
        "like": "",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("marcov", r"unknown predictor 'marcov': choose one of auto, off, none, .*markov"),
        ("", r"unknown predictor ''"),
        ("markov:0", r"distance of predictor markov is '0': it must be a number of layers"),
        (
            "markov:-1",
            r"distance of predictor markov is '-1': it must be a number of layers",
        ),
        (
            "markov:1.5",
            r"distance of predictor markov is '1.5': it must be a number of layers",
        ),
        (
            "markov:far",
            r"distance of predictor markov is 'far': it must be a number of layers",
        ),
        ("markov:", r"nothing follows the colon in predictor 'markov:'"),
        ("markov:,a=1", r"must follow the colon of predictor markov, not ',a=1'"),
        ("token:2", r"predictor token has no distance to choose: leave out '2'"),
        ("off:2", r"predictor none has no distance to choose: leave out '2'"),
        ("auto:2", r"predictor auto has no distance to choose: leave out '2'"),
        ("markov:1,2", r"predictor markov has no options: leave out '2'"),
        ("markov:a=1", r"predictor markov has no options: leave out 'a=1'"),
        ("noisy-oracle:1,noise=1", r"unknown option of noisy-oracle 'noise': choose one of accu"),
        (
            "noisy-oracle:1,accuracy",
            r"give each option of predictor noisy-oracle once, as name=value",
        ),
        (
            "noisy-oracle:accuracy=1,accuracy=0",
            r"'accuracy=0': give each option of predictor noisy-oracle once",
        ),
        ("noisy-oracle:accuracy=2", r"accuracy of noisy-oracle must be between -1 and 1, got 2"),
        ("popularity:half-life=0", r"half-life of popularity must be between 0.1 and"),
    ],
)
def test_a_wrong_choice_is_refused_in_one_line(text, message):
    with pytest.raises(UsageError, match=message) as caught:
        predictor(text)
    assert "\n" not in str(caught.value)
    if message.startswith("unknown"):
        assert isinstance(caught.value, UnknownName)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("oracle", r"predictor oracle needs the complete trace beforehand"),
        ("noisy-oracle", r"predictor noisy-oracle needs the complete trace beforehand"),
        ("recorded", r"predictor recorded needs a trace with predictions: record the trace"),
        ("pregated", r"predictor pregated needs a model's routers or a trace"),
    ],
)
def test_a_missing_argument_is_refused_in_one_line(text, message):
    with pytest.raises(UsageError, match=message) as caught:
        predictor(text).build(PredictorSetup(Shape((4, 4), 2)))
    assert "\n" not in str(caught.value)
