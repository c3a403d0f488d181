"""Laws that hold for every predictor in the table."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.core.predictor import Predictor
from greenroom.errors import UsageError
from greenroom.predictors import PREDICTORS, PredictorSetup, predictor
from tests.predictors.replay import Predicted, Routing, accuracy, replay
from tests.predictors.small import SHAPE, FakeGates, flatten, routing, run_predictor

# Predictors that are built from a file are tested with the code that writes the file.
NAMES = [name for name, kind in PREDICTORS.items() if "file" not in kind.needs]
NEED_INPUTS = [name for name in NAMES if "inputs" in PREDICTORS[name].needs]  # no trace has them
AHEAD = [name for name in NAMES if PREDICTORS[name].distance is not None]
LEARN = [name for name in NAMES if not PREDICTORS[name].needs & {"trace", "gates"}]


def setting(trace: Routing, seed: int = 0) -> PredictorSetup:
    predictions = replay(predictor("markov").build(PredictorSetup(SHAPE)), trace, SHAPE)
    return PredictorSetup(SHAPE, seed, FakeGates(), trace.experts, {"markov": predictions})


def build(text: str, trace: Routing, seed: int = 0) -> Predictor:
    return predictor(text).build(setting(trace, seed))


@pytest.mark.parametrize("name", [*NAMES, *(f"{name}:2" for name in AHEAD), "markov:3"])
@pytest.mark.parametrize("seed", range(3))
def test_predictions_are_distinct_experts_of_later_layers(name, seed):
    trace = routing(seed)
    tested = build(name, trace)
    for at, layer, predictions in run_predictor(tested, trace):
        layers = [prediction.layer for prediction in predictions]
        assert len(set(layers)) == len(layers)
        for target, ids, _ in predictions:
            assert layer < target < 2 * SHAPE.layers
            assert len(ids) == (at.tokens if target < SHAPE.layers else 1)
            assert ids.dtype == np.int64
            assert ids.shape[1] <= SHAPE.width
            assert ids.min() >= -1
            assert ids.max() < SHAPE.experts_per_layer[target % SHAPE.layers]
            for row in ids.tolist():
                predicted_ids = [i for i in row if i >= 0]
                assert len(set(predicted_ids)) == len(predicted_ids)


@pytest.mark.parametrize("name", [name for name in AHEAD if name not in NEED_INPUTS])
@pytest.mark.parametrize("distance", [1, 2, 3])
def test_each_layer_of_each_decode_pass_is_predicted_its_distance_before(name, distance):
    """Only passes after the first 40 tokens are checked, since predictors have to learn first."""
    trace = routing(5)
    tested = build(f"{name}:{distance}", trace)
    assert tested.distance == distance
    predicted = replay(tested, trace, SHAPE)
    assert predicted.distance == distance
    starts = trace.pass_starts[:-1]
    single = starts[(np.diff(trace.pass_starts) == 1) & (starts > 40)]
    later = np.setdiff1d(single, trace.request_starts[:-1])
    assert later.size
    # MoE-Infinity's layer proximity is 0 where the layer itself comes again
    expected = (name, distance) != ("eamc", SHAPE.layers)
    assert ((predicted.experts[later][..., 0] != 255) == expected).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_predictions(name):
    trace = routing(1)
    assert flatten(run_predictor(build(name, trace), trace)) == flatten(
        run_predictor(build(name, trace), trace)
    )


def test_another_seed_gives_other_errors():
    trace = routing(1)
    first, second = (build("noisy-oracle:1,accuracy=0.5", trace, seed) for seed in (0, 1))
    assert flatten(run_predictor(first, trace)) != flatten(run_predictor(second, trace))


@pytest.mark.parametrize("name", NAMES)
def test_a_restored_predictor_continues_as_the_original(name):
    trace = routing(2)
    half = int(trace.request_starts[2])
    first, second, fresh = (build(name, trace) for _ in range(3))
    flatten(run_predictor(first, trace, 0, half))
    state = {key: np.array(value) for key, value in first.state().items()}
    second.restore(state)
    for at, _, _ in run_predictor(second, trace, half):
        if at.first > half:
            break  # `second` must not have written into `state`
    assert all((np.array(value) == first.state()[key]).all() for key, value in state.items())
    second = build(name, trace)
    second.restore(state)
    continued = flatten(run_predictor(first, trace, half))
    assert flatten(run_predictor(second, trace, half)) == continued
    if name in LEARN and name != "none":
        assert flatten(run_predictor(fresh, trace, half)) != continued


@pytest.mark.parametrize("name", LEARN)
def test_a_state_of_another_model_is_refused(name):
    trace = routing(3)
    tested = build(name, trace)
    flatten(run_predictor(tested, trace))
    state = dict(tested.state())
    for key, value in state.items():
        named = "layers ahead" if key == "distance" else key
        with pytest.raises(ValueError, match=named.replace("_", ".")):
            build(name, trace).restore({**state, key: np.zeros((2, *value.shape), value.dtype)})
        with pytest.raises(ValueError, match=named.replace("_", ".")):
            build(name, trace).restore({k: v for k, v in state.items() if k != key})


@pytest.mark.parametrize("name", NAMES)
def test_an_abandoned_pass_does_not_disturb_the_next_request(name):
    """Generation is cancelled between two layers."""
    trace = routing(4)
    tested = build(name, trace)
    until = int(trace.request_starts[1])
    predicted = run_predictor(tested, trace, 0, until)
    for _ in range(9):  # in the third pass, after its first layer
        next(predicted)
    predicted.close()
    assert flatten(run_predictor(tested, trace, until)) or name == "none"


@pytest.mark.parametrize("name", NAMES)
def test_a_distance_beyond_the_model_is_refused(name):
    trace = routing(0)
    if name in AHEAD:
        with pytest.raises(
            UsageError,
            match="the model has 3 MoE layers, so a predictor cannot predict 4 layers ahead",
        ):
            build(f"{name}:4", trace)
    else:
        with pytest.raises(UsageError, match=f"predictor {name} has no distance to choose"):
            predictor(f"{name}:1")


@pytest.mark.parametrize("name", ["markov:2", "popularity:3", "token", "noisy-oracle:2"])
def test_recorded_replays_the_predictions_of_a_trace(name):
    trace = routing(6)
    first = replay(build(name, trace), trace, SHAPE)
    again = predictor("recorded").build(PredictorSetup(SHAPE, predictions={"it": first}))
    assert again.distance == (first.distance or None)
    second = replay(again, trace, SHAPE)
    assert second.distance == first.distance
    assert (second.experts == first.experts).all()


def test_the_oracle_is_always_right_and_the_noisy_one_as_often_as_configured():
    trace = routing(7, tokens=4000)
    for distance in (1, 3):
        predicted = replay(build(f"oracle:{distance}", trace), trace, SHAPE)
        assert accuracy(predicted.experts, trace.experts).tolist() == [1, 1, 1]
    for expected_share in (0.0, 0.3, 0.9, 1.0):
        predicted = replay(build(f"noisy-oracle:2,accuracy={expected_share}", trace), trace, SHAPE)
        share = accuracy(predicted.experts, trace.experts)
        assert (
            np.abs(share - expected_share).max() < 0.03
        )  # 8000 experts a layer: 5 standard deviations


def test_none_predicts_nothing():
    trace = routing(8)
    predicted: Predicted = replay(build("none", trace), trace, SHAPE)
    assert (predicted.experts == 255).all()
    assert accuracy(predicted.experts, trace.experts).tolist() == [0, 0, 0]
