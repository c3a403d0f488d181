"""next-gate, with routers that say what they were asked."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.core.predictor import Ids, Inputs, LayerRouting, PassStart, Shape
from greenroom.errors import UsageError
from greenroom.predictors import PREDICTORS, predictor
from greenroom.predictors.helpers.kind import PredictorSetup

SHAPE = Shape((8, 8, 8), 2)
IDS = np.zeros((1, 2), np.int64)


class Gates:
    """Routers whose ranking is the layer, then the first hidden state, then nothing much."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def rank(self, layer: int, inputs: Inputs, width: int) -> Ids:
        self.asked.append((layer, len(inputs)))
        ranked = np.tile(np.arange(width), (len(inputs), 1))
        ranked[:, 0], ranked[:, 1] = layer, inputs[:, 0]
        return ranked


def seen(layer: int, *states: float) -> LayerRouting:
    return LayerRouting(layer, IDS, None, np.array([[state, 0.0] for state in states], np.float32))


def begins(tokens: int = 1) -> PassStart:
    return PassStart(request=0, first=0, tokens=tokens, prefill=False)


@pytest.mark.parametrize(("distance", "targets"), [(1, [1, 2, 3]), (2, [2, 3, 4]), (3, [3, 4, 5])])
def test_asks_the_router_that_lies_ahead(distance: int, targets: list[int]) -> None:
    gates = Gates()
    asks = predictor(f"next-gate:{distance}").build(PredictorSetup(SHAPE, gates=gates))
    assert asks.distance == distance
    asks.begin(begins(2))
    assert asks.predict(-1) == []
    for layer, target in enumerate(targets):
        asks.observe(seen(layer, 10 + layer, 20 + layer))
        (guess,) = asks.predict(layer)
        assert guess.layer == target
        states = [10 + layer, 20 + layer] if target < 3 else [20 + layer]  # the last token's
        assert guess.experts[:, :2].tolist() == [[target % 3, state] for state in states]
        assert guess.experts.shape[1] == SHAPE.width
    assert [layer for layer, _ in gates.asked] == [target % 3 for target in targets]


def test_a_pass_begins_without_the_states_of_the_one_before() -> None:
    asks = predictor("next-gate").build(PredictorSetup(SHAPE, gates=Gates()))
    asks.begin(begins())
    asks.observe(seen(2, 1))
    assert len(asks.predict(2)) == 1
    asks.begin(begins())
    assert asks.predict(-1) == []


def test_what_it_needs() -> None:
    assert PREDICTORS["next-gate"].needs == {"inputs", "gates"}
    with pytest.raises(UsageError, match="needs the model's routers"):
        predictor("next-gate").build(PredictorSetup(SHAPE))
    with pytest.raises(
        UsageError, match="has 3 MoE layers, so a predictor cannot predict 4 layers ahead"
    ):
        predictor("next-gate:4").build(PredictorSetup(SHAPE, gates=Gates()))


def test_has_nothing_to_keep() -> None:
    asks = predictor("next-gate").build(PredictorSetup(SHAPE, gates=Gates()))
    assert asks.state() == {}
    with pytest.raises(ValueError, match="has no state"):
        asks.restore({"table": IDS})
