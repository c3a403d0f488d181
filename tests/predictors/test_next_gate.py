"""next-gate, with routers that record their calls."""

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
        self.calls: list[tuple[int, int]] = []

    def rank(self, layer: int, inputs: Inputs, width: int) -> Ids:
        self.calls.append((layer, len(inputs)))
        ranked = np.tile(np.arange(width), (len(inputs), 1))
        ranked[:, 0], ranked[:, 1] = layer, inputs[:, 0]
        return ranked


def routing_of(layer: int, *states: float) -> LayerRouting:
    return LayerRouting(layer, IDS, None, np.array([[state, 0.0] for state in states], np.float32))


def start(tokens: int = 1) -> PassStart:
    return PassStart(request=0, first=0, tokens=tokens, prefill=False)


@pytest.mark.parametrize(("distance", "targets"), [(1, [1, 2, 3]), (2, [2, 3, 4]), (3, [3, 4, 5])])
def test_next_gate_calls_the_router_of_the_layer_ahead(distance: int, targets: list[int]) -> None:
    gates = Gates()
    tested = predictor(f"next-gate:{distance}").build(PredictorSetup(SHAPE, gates=gates))
    assert tested.distance == distance
    tested.begin(start(2))
    assert tested.predict(-1) == []
    for layer, target in enumerate(targets):
        tested.observe(routing_of(layer, 10 + layer, 20 + layer))
        (prediction,) = tested.predict(layer)
        assert prediction.layer == target
        states = [10 + layer, 20 + layer] if target < 3 else [20 + layer]  # the last token's
        assert prediction.experts[:, :2].tolist() == [[target % 3, state] for state in states]
        assert prediction.experts.shape[1] == SHAPE.width
    assert [layer for layer, _ in gates.calls] == [target % 3 for target in targets]


def test_with_all_ranks_every_expert_of_the_layer_is_named() -> None:
    shape = Shape((8, 5), 2)
    tested = predictor("next-gate:width=all").build(PredictorSetup(shape, gates=Gates()))
    assert tested.width == 8
    tested.begin(start())
    tested.observe(routing_of(0, 3))
    assert tested.predict(0)[0].experts.tolist() == [[1, 3, 2, 3, 4]]
    tested.observe(routing_of(1, 3))
    assert tested.predict(1)[0].experts.shape == (1, 8)
    with pytest.raises(UsageError, match="width of next-gate 'most': choose one of twice, all"):
        predictor("next-gate:width=most")


def test_a_pass_begins_without_the_inputs_of_the_pass_before() -> None:
    tested = predictor("next-gate").build(PredictorSetup(SHAPE, gates=Gates()))
    tested.begin(start())
    tested.observe(routing_of(2, 1))
    assert len(tested.predict(2)) == 1
    tested.begin(start())
    assert tested.predict(-1) == []


def test_next_gate_needs_routers_and_enough_layers() -> None:
    assert PREDICTORS["next-gate"].needs == {"inputs", "gates"}
    with pytest.raises(UsageError, match="needs the model's routers"):
        predictor("next-gate").build(PredictorSetup(SHAPE))
    with pytest.raises(
        UsageError, match="has 3 MoE layers, so a predictor cannot predict 4 layers ahead"
    ):
        predictor("next-gate:4").build(PredictorSetup(SHAPE, gates=Gates()))


def test_next_gate_has_no_state() -> None:
    tested = predictor("next-gate").build(PredictorSetup(SHAPE, gates=Gates()))
    assert tested.state() == {}
    with pytest.raises(ValueError, match="has no state"):
        tested.restore({"table": IDS})
