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
    made = {"distance": np.array([distance])}
    for layer, experts in enumerate(shape.experts_per_layer):
        sizes = {"up.weight": (HIDDEN, WIDTH), "up.bias": (HIDDEN,)}
        sizes |= {"down.weight": (experts, HIDDEN), "down.bias": (experts,)}
        for name, size in sizes.items():
            made[f"{layer}.{name}"] = random.standard_normal(size).astype(np.float32)
    return made


def begins(tokens: int = 1) -> PassStart:
    return PassStart(request=0, first=0, tokens=tokens, prefill=False)


@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize("distance", [1, 2, 3])
def test_ranks_by_the_network_of_the_layer_ahead(distance: int, tokens: int) -> None:
    made = tensors(distance=distance)
    it = predictor("learned").build(PredictorSetup(SHAPE, tensors=made))
    assert it.distance == distance
    it.begin(begins(tokens))
    assert it.predict(-1) == []
    random = np.random.default_rng(1)
    for layer in range(3):
        x = random.standard_normal((tokens, WIDTH)).astype(np.float32)
        it.observe(LayerRouting(layer, IDS, None, x))
        (guess,) = it.predict(layer)
        assert guess.layer == layer + distance
        target = guess.layer % 3
        rows = x if guess.layer < 3 else x[-1:]
        up = to_float32(to_bfloat16(made[f"{target}.up.weight"]))
        hidden = np.maximum(rows @ up.T + made[f"{target}.up.bias"], 0)
        scores = hidden @ made[f"{target}.down.weight"].T + made[f"{target}.down.bias"]
        wanted = np.argsort(-scores, axis=1)[:, : SHAPE.width]
        assert guess.experts.tolist() == wanted.tolist()
    it.begin(begins())
    assert it.predict(-1) == []


def test_bfloat16_is_the_nearest() -> None:
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(0)
    values = np.concatenate([random.standard_normal(1000), [0, -0.0, 1.00390625, 1.01171875, 3e38]])
    values = values.astype(np.float32).reshape(3, -1)
    wanted = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(to_float32(to_bfloat16(values)), wanted)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({}, "tensor `distance` is not a number from 1 to 3"),
        ({**tensors(), "distance": np.array([0])}, "tensor `distance` is not a number from 1 to 3"),
        ({**tensors(), "distance": np.array([4])}, "tensor `distance` is not a number from 1 to 3"),
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
def test_what_does_not_fit_is_refused_in_one_line(made: dict, words: str) -> None:
    with pytest.raises(PredictorError, match=words) as error:
        predictor("learned").build(PredictorSetup(SHAPE, tensors=made))
    assert "\n" not in str(error.value)


def test_what_it_needs() -> None:
    assert PREDICTORS["learned"].needs == {"inputs", "file"}
    with pytest.raises(UsageError, match="needs a file of `greenroom train-predictor`"):
        predictor("learned").build(PredictorSetup(SHAPE))
    with pytest.raises(UsageError, match="has no distance to choose"):
        predictor("learned:2")
