from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from greenroom.core.predictor import LayerPrediction, LayerRouting, PassStart
from greenroom.core.prefetch.foresight import Foresight, ranked
from greenroom.errors import PredictorError

OFFSETS = (0, 6, 10, 17)  # layers of 6, 4 and 7 experts


class FixedPredictor:
    """A predictor with fixed predictions that records its calls."""

    name, distance = "says", None

    def __init__(self, *guesses: tuple[int, Sequence[Sequence[int]]]) -> None:
        self.guesses = [LayerPrediction(layer, np.array(rows)) for layer, rows in guesses]
        self.observed: list[object] = []

    def begin(self, at: PassStart) -> None:
        self.observed.append(at)

    def observe(self, routing: LayerRouting) -> None:
        self.observed.append(routing)

    def predict(self, layer: int) -> list[LayerPrediction]:
        self.observed.append(layer)
        return self.guesses


def at(prefill: bool) -> PassStart:
    return PassStart(0, 0, 2 if prefill else 1, prefill)


ROUTING = LayerRouting(1, np.array([[2, 0]]))


def layers_predicted(events) -> list[tuple[int, list[int]]]:
    return [(event.layer, event.experts.tolist()) for event in events]


def test_predictions_get_dense_ids_and_layers_of_the_next_pass():
    foresight = Foresight(FixedPredictor((2, [[3, 0]]), (3, [[5, 1]]), (4, [[2, 2]])), OFFSETS)
    foresight.begin(at(False))
    events = layers_predicted(foresight.routed(ROUTING))
    assert events == [(2, [13, 10]), (0, [5, 1]), (1, [8, 8])]


def test_predictions_have_the_distance_from_the_layer_after_which_they_are_made():
    foresight = Foresight(FixedPredictor((2, [[3, 0]]), (4, [[2, 2]])), OFFSETS)
    assert [event.distance for event in foresight.begin(at(False))] == [3, 5]
    assert [event.distance for event in foresight.routed(ROUTING)] == [1, 3]


def test_a_predicted_expert_that_the_layer_lacks_is_an_error():
    foresight = Foresight(FixedPredictor((1, [[0, 4]])), OFFSETS)
    with pytest.raises(
        PredictorError, match="says predicts expert 4 in layer 1, whose experts are 0 to 3"
    ):
        foresight.begin(at(False))


def test_a_prompt_predicts_only_the_pass_after_it():
    foresight = Foresight(FixedPredictor((2, [[3, 0]]), (3, [[5, 1]])), OFFSETS)
    assert layers_predicted(foresight.begin(at(True))) == [(0, [5, 1])]
    assert layers_predicted(foresight.routed(ROUTING)) == [(0, [5, 1])]
    assert len(foresight.begin(at(False))) == 2


def test_a_prompt_s_layers_are_not_predicted_where_none_of_the_next_pass_is_reached():
    predictor = FixedPredictor((3, [[5, 1]]))
    predictor.distance = 2
    foresight = Foresight(predictor, OFFSETS)
    foresight.begin(at(True))
    foresight.routed(LayerRouting(0, np.array([[2, 0]])))
    assert -1 not in predictor.observed  # after neither was a prediction asked for
    assert 0 not in predictor.observed
    assert layers_predicted(foresight.routed(ROUTING)) == [(0, [5, 1])]
    foresight.begin(at(False))
    assert -1 in predictor.observed


def test_a_switched_off_predictor_observes_and_does_not_predict():
    predictor = FixedPredictor((2, [[3]]))
    foresight = Foresight(predictor, OFFSETS)
    foresight.on = False
    assert foresight.begin(at(False)) == []
    assert foresight.routed(ROUTING) == []
    assert predictor.observed == [at(False), ROUTING]
    foresight.on = True
    assert layers_predicted(foresight.routed(ROUTING)) == [(2, [13])]
    assert predictor.observed[-1] == ROUTING.layer


@pytest.mark.parametrize(
    ("rows", "order"),
    [
        ([[4, 2, 0]], [4, 2, 0]),
        ([[4, 2, -1]], [4, 2]),
        ([[-1, -1, -1]], []),
        # first counts 3, second 2, third 1: expert 0 has 1 + 3, 4 has 3, 2 has 2 + 2, 1 has 1
        ([[4, 2, 0], [0, 2, 1]], [0, 2, 4, 1]),
        ([[5, -1, -1], [5, 1, -1], [-1, -1, -1]], [5, 1]),
        ([[-1, -1], [-1, -1]], []),
    ],
)
def test_one_ranking_of_several_tokens(rows, order):
    assert ranked(np.array(rows)).tolist() == order
