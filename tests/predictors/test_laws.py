"""Laws that every predictor in the table keeps."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.core.predictor import Predictor
from greenroom.errors import UsageError
from greenroom.predictors import PREDICTORS, PredictorSetup, predictor
from tests.predictors.replay import Predicted, Routing, accuracy, replay
from tests.predictors.small import SHAPE, FakeGates, flat, routing, said

# Those that are made from a file are tested beside what writes the file.
NAMES = [name for name, kind in PREDICTORS.items() if "file" not in kind.needs]
NEED_INPUTS = [name for name in NAMES if "inputs" in PREDICTORS[name].needs]  # no trace has them
AHEAD = [name for name in NAMES if PREDICTORS[name].distance is not None]
LEARN = [name for name in NAMES if not PREDICTORS[name].needs & {"trace", "gates"}]


def setting(trace: Routing, seed: int = 0) -> PredictorSetup:
    guesses = replay(predictor("markov").build(PredictorSetup(SHAPE)), trace, SHAPE)
    return PredictorSetup(SHAPE, seed, FakeGates(), trace.experts, {"markov": guesses})


def made(text: str, trace: Routing, seed: int = 0) -> Predictor:
    return predictor(text).build(setting(trace, seed))


@pytest.mark.parametrize("name", [*NAMES, *(f"{name}:2" for name in AHEAD), "markov:3"])
@pytest.mark.parametrize("seed", range(3))
def test_guesses_name_distinct_experts_of_layers_to_come(name, seed):
    trace = routing(seed)
    it = made(name, trace)
    for at, layer, guesses in said(it, trace):
        layers = [guess.layer for guess in guesses]
        assert len(set(layers)) == len(layers)
        for target, ids in guesses:
            assert layer < target < 2 * SHAPE.layers
            assert len(ids) == (at.tokens if target < SHAPE.layers else 1)
            assert ids.dtype == np.int64
            assert ids.shape[1] <= SHAPE.width
            assert ids.min() >= -1
            assert ids.max() < SHAPE.experts_per_layer[target % SHAPE.layers]
            for row in ids.tolist():
                named = [i for i in row if i >= 0]
                assert len(set(named)) == len(named)


@pytest.mark.parametrize("name", [name for name in AHEAD if name not in NEED_INPUTS])
@pytest.mark.parametrize("distance", [1, 2, 3])
def test_each_layer_of_each_decode_pass_is_predicted_its_distance_before(name, distance):
    """Once there was something to learn from."""
    trace = routing(5)
    it = made(f"{name}:{distance}", trace)
    assert it.distance == distance
    predicted = replay(it, trace, SHAPE)
    assert predicted.distance == distance
    starts = trace.pass_starts[:-1]
    single = starts[(np.diff(trace.pass_starts) == 1) & (starts > 40)]
    later = np.setdiff1d(single, trace.request_starts[:-1])
    assert later.size
    # MoE-Infinity's layer proximity is 0 where the layer itself comes again
    expected = (name, distance) != ("eamc", SHAPE.layers)
    assert ((predicted.experts[later][..., 0] != 255) == expected).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_says_the_same(name):
    trace = routing(1)
    assert flat(said(made(name, trace), trace)) == flat(said(made(name, trace), trace))


def test_another_seed_is_another_noise():
    trace = routing(1)
    first, second = (made("noisy-oracle:1,accuracy=0.5", trace, seed) for seed in (0, 1))
    assert flat(said(first, trace)) != flat(said(second, trace))


@pytest.mark.parametrize("name", NAMES)
def test_what_was_learned_goes_on_where_it_ended(name):
    trace = routing(2)
    half = int(trace.request_starts[2])
    first, second, fresh = (made(name, trace) for _ in range(3))
    flat(said(first, trace, 0, half))
    kept = {key: np.array(value) for key, value in first.state().items()}
    second.restore(kept)
    for at, _, _ in said(second, trace, half):
        if at.first > half:
            break  # it must not have written into what it was given
    assert all((np.array(value) == first.state()[key]).all() for key, value in kept.items())
    second = made(name, trace)
    second.restore(kept)
    goes_on = flat(said(first, trace, half))
    assert flat(said(second, trace, half)) == goes_on
    if name in LEARN and name != "none":
        assert flat(said(fresh, trace, half)) != goes_on


@pytest.mark.parametrize("name", LEARN)
def test_a_state_of_another_model_is_refused(name):
    trace = routing(3)
    it = made(name, trace)
    flat(said(it, trace))
    state = dict(it.state())
    for key, value in state.items():
        with pytest.raises(ValueError, match=key.replace("_", ".")):
            made(name, trace).restore({**state, key: np.zeros((2, *value.shape), value.dtype)})
        with pytest.raises(ValueError, match=key.replace("_", ".")):
            made(name, trace).restore({k: v for k, v in state.items() if k != key})


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_may_be_given_up_and_another_request_come(name):
    """Generation is cancelled between two layers."""
    trace = routing(4)
    it = made(name, trace)
    until = int(trace.request_starts[1])
    told = said(it, trace, 0, until)
    for _ in range(9):  # in the third pass, after its first layer
        next(told)
    told.close()
    assert flat(said(it, trace, until)) or name == "none"


@pytest.mark.parametrize("name", NAMES)
def test_a_distance_beyond_the_model_is_refused(name):
    trace = routing(0)
    if name in AHEAD:
        with pytest.raises(
            UsageError,
            match="the model has 3 MoE layers, so a predictor cannot predict 4 layers ahead",
        ):
            made(f"{name}:4", trace)
    else:
        with pytest.raises(UsageError, match=f"predictor {name} has no distance to choose"):
            predictor(f"{name}:1")


@pytest.mark.parametrize("name", ["markov:2", "popularity:3", "token", "noisy-oracle:2"])
def test_recorded_says_again_what_a_trace_holds(name):
    trace = routing(6)
    first = replay(made(name, trace), trace, SHAPE)
    again = predictor("recorded").build(PredictorSetup(SHAPE, predictions={"it": first}))
    assert again.distance == (first.distance or None)
    second = replay(again, trace, SHAPE)
    assert second.distance == first.distance
    assert (second.experts == first.experts).all()


def test_the_oracle_is_always_right_and_the_noisy_one_as_often_as_asked():
    trace = routing(7, tokens=4000)
    for distance in (1, 3):
        told = replay(made(f"oracle:{distance}", trace), trace, SHAPE)
        assert accuracy(told.experts, trace.experts).tolist() == [1, 1, 1]
    for asked in (0.0, 0.3, 0.9, 1.0):
        told = replay(made(f"noisy-oracle:2,accuracy={asked}", trace), trace, SHAPE)
        share = accuracy(told.experts, trace.experts)
        assert np.abs(share - asked).max() < 0.03  # 8000 experts a layer: 5 standard deviations


def test_none_says_nothing_and_scores_nothing():
    trace = routing(8)
    told: Predicted = replay(made("none", trace), trace, SHAPE)
    assert (told.experts == 255).all()
    assert accuracy(told.experts, trace.experts).tolist() == [0, 0, 0]
