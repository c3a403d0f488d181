"""learned, with networks that are written by hand or at random."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.core.predictor import LayerRouting, PassStart, Shape
from greenroom.errors import PredictorError, UsageError
from greenroom.predictors import PREDICTORS, PredictorSetup, predictor
from greenroom.predictors.learned import to_bfloat16, to_float32

SHAPE = Shape((6, 4, 7), 2)
HIDDEN, WIDTH = 5, 10
IDS = np.zeros((1, 2), np.int64)


def tensors(seed: int = 0, distance: int = 1, shape: Shape = SHAPE) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    arrays = {"distance": np.array([distance])}
    for layer, experts in enumerate(shape.experts_per_layer[1:], 1):
        sizes = {"up.weight": (HIDDEN, WIDTH), "up.bias": (HIDDEN,)}
        sizes |= {"down.weight": (experts, HIDDEN), "down.bias": (experts,)}
        for name, size in sizes.items():
            arrays[f"{layer}.{name}"] = random.standard_normal(size).astype(np.float32)
    return arrays


def start(tokens: int = 1) -> PassStart:
    return PassStart(request=0, first=0, tokens=tokens, prefill=False)


@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize(
    ("distance", "targets"),  # of the layers 0 to 3: each later layer is predicted once
    [(1, [[1], [2], [3], []]), (2, [[1, 2], [3], [], []]), (3, [[1, 2, 3], [], [], []])],
)
def test_ranks_by_the_network_of_the_layer_ahead(
    distance: int, targets: list[list[int]], tokens: int
) -> None:
    """Layers nearer to the first one than the distance are predicted from the first one's input."""
    shape = Shape((6, 4, 7, 5), 2)
    arrays = tensors(distance=distance, shape=shape)
    tested = predictor("learned").build(PredictorSetup(shape, tensors=arrays))
    assert tested.distance == distance
    tested.begin(start(tokens))
    assert tested.predict(-1) == []
    random = np.random.default_rng(1)
    for layer, expected_targets in enumerate(targets):
        x = random.standard_normal((tokens, WIDTH)).astype(np.float32)
        tested.observe(LayerRouting(layer, IDS, None, x))
        predictions = tested.predict(layer)
        assert [prediction.layer for prediction in predictions] == expected_targets
        for target, experts, _ in predictions:
            up = to_float32(to_bfloat16(arrays[f"{target}.up.weight"]))
            hidden = np.maximum(x @ up.T + arrays[f"{target}.up.bias"], 0)
            scores = hidden @ arrays[f"{target}.down.weight"].T + arrays[f"{target}.down.bias"]
            expected = np.argsort(-scores, axis=1)[:, : shape.width]
            assert experts.tolist() == expected.tolist()
    tested.begin(start())
    assert tested.predict(-1) == []


class Gates:
    """Routers that rank the expert 3 first, and count their calls."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def rank(self, layer: int, inputs: np.ndarray, width: int) -> np.ndarray:
        self.calls.append(layer)
        return np.tile(np.roll(np.arange(width), 1), (len(inputs), 1))


def test_layers_of_next_gate_are_ranked_by_their_routers() -> None:
    """Distance 2: both are predicted at layer 0, layer 2 by its router."""
    arrays = tensors(distance=2)
    flags = {"next_gate": np.array([0, 0, 1], np.uint8)}
    gates = Gates()
    setup = PredictorSetup(SHAPE, tensors={**arrays, **flags}, gates=gates)
    mixed = predictor("learned").build(setup)
    plain = predictor("learned").build(PredictorSetup(SHAPE, tensors=arrays))
    x = np.random.default_rng(1).standard_normal((1, WIDTH)).astype(np.float32)
    for each in (mixed, plain):
        each.begin(start())
        each.observe(LayerRouting(0, IDS, None, x))
    first, second = mixed.predict(0)
    assert first.experts.tolist() == plain.predict(0)[0].experts.tolist()
    assert second.experts.tolist() == [[3, 0, 1, 2]]
    assert gates.calls == [2]
    with pytest.raises(UsageError, match="needs the model's routers: train one without"):
        predictor("learned").build(PredictorSetup(SHAPE, tensors={**arrays, **flags}))


@pytest.mark.parametrize(
    "flags",
    [
        np.array([0, 1], np.uint8),
        np.array([1, 0, 0], np.uint8),
        np.array([0, 2, 0], np.uint8),
        np.array([0, 1, 0], np.int64),
    ],
)
def test_damaged_layers_of_next_gate_are_refused(flags: np.ndarray) -> None:
    setup = PredictorSetup(SHAPE, tensors={**tensors(), "next_gate": flags}, gates=Gates())
    with pytest.raises(PredictorError, match="`next_gate` is not a 0 or 1 for each of 3 layers"):
        predictor("learned").build(setup)


def test_bfloat16_rounding_is_to_the_nearest() -> None:
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(0)
    values = np.concatenate([random.standard_normal(1000), [0, -0.0, 1.00390625, 1.01171875, 3e38]])
    values = values.astype(np.float32).reshape(3, -1)
    expected = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(to_float32(to_bfloat16(values)), expected)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "tensor `distance` is not a number from 1 to 2"),
        ({**tensors(), "distance": np.array([0])}, "tensor `distance` is not a number from 1 to 2"),
        ({**tensors(), "distance": np.array([3])}, "tensor `distance` is not a number from 1 to 2"),
        (tensors(shape=Shape((6, 4), 2)), "no complete network for MoE layer 2"),
        (
            tensors(shape=Shape((6, 4, 8), 2)),
            "for another model: its network for MoE layer 2 does not predict 7 experts",
        ),
        (
            tensors(shape=Shape((6, 4, 7, 7), 2)),
            "for another model: it has networks for more than 3 MoE layers",
        ),
        ({**tensors(), "1.up.bias": np.zeros(HIDDEN)}, "no complete network for MoE layer 1"),
        (
            {**tensors(), "1.up.bias": np.zeros(4, np.float32)},
            "MoE layer 1 does not predict 4 experts",
        ),
        (
            {**tensors(), "1.up.weight": np.zeros((HIDDEN, 3), np.float32)},
            "networks have different input sizes",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_in_one_line(arrays: dict, message: str) -> None:
    with pytest.raises(PredictorError, match=message) as error:
        predictor("learned").build(PredictorSetup(SHAPE, tensors=arrays))
    assert "\n" not in str(error.value)


def test_it_needs_a_file_and_has_no_distance_to_choose() -> None:
    assert PREDICTORS["learned"].needs == {"inputs", "file"}
    with pytest.raises(UsageError, match="needs a file of `greenroom train-predictor`"):
        predictor("learned").build(PredictorSetup(SHAPE))
    with pytest.raises(UsageError, match="has no distance to choose"):
        predictor("learned:2")
