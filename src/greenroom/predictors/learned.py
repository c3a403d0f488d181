"""learned: predicts experts by a small network for each layer, trained offline (ProMoE, 4.4).

    scores[l] = down[l] relu(up[l] x + b[l]) + c[l]

x is the input of the router of layer l - distance, or of layer 0 where l < distance, for the same
token (the paper's footnote 1). Layer 0 is not predicted: by this rule its prediction would be made
from its own router's input, when the router has chosen already. `greenroom train-predictor` trains
the networks. The tensors of its file are

    distance [1]; for each layer N from 1: N.up.weight [width, hidden], N.up.bias [width],
    N.down.weight [experts, width], N.down.bias [experts]
    next_gate [layers] uint8 (optional): 1 for layers that are predicted as by next-gate

The time for one token is that of reading `up`, which is stored in bfloat16: this takes half the
memory of float32, and a quarter less time after experts have displaced it from the processor's
cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from greenroom.core.compiling.compile_cache import jit
from greenroom.core.predictor import Ids, Inputs, LayerPrediction, Shape
from greenroom.core.ranking import top
from greenroom.errors import PredictorError, UsageError
from greenroom.predictors.helpers.kind import PredictorKind, PredictorSetup
from greenroom.predictors.next_gate import InputPredictor

Floats = NDArray[np.float32]
BFloat16 = NDArray[np.uint16]  # bfloat16: the upper 16 bits of float32
NEXT_GATE = "next_gate"  # name of the tensor
FEW = 4  # tokens; for more, NumPy multiplies


class Network(NamedTuple):
    """Small neural network (MLP with one hidden layer) that predicts the experts of one layer."""

    up: BFloat16  # [width, hidden], with the model's hidden size
    up_bias: Floats  # [width]
    down: Floats  # [experts, width]
    down_bias: Floats  # [experts]


def to_bfloat16(values: Floats) -> BFloat16:
    """Round float32 values to the nearest bfloat16, ties to even, as uint16 bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    near = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    rounded: BFloat16 = near.astype(np.uint16)
    return rounded


def to_float32(values: BFloat16) -> Floats:
    """Convert bfloat16 values (uint16 bits) to float32, exactly."""
    return (values.astype(np.uint32) << 16).view(np.float32)


@jit(fastmath=True)  # sums in any order, so that they are vectorised
def forward(x: Inputs, network: Network, scores: Floats) -> None:
    """Write an MLP's scores [tokens, experts] for hidden states x [tokens, hidden].

    Each row of `up` is converted to float32 just before it is used, in the processor's L1 cache.
    """
    up, up_bias, down, down_bias = network
    hidden = np.empty(up.shape[0], np.float32)
    bits = np.empty(up.shape[1], np.uint32)
    row = bits.view(np.float32)
    for token in range(x.shape[0]):
        for j in range(up.shape[0]):
            for i in range(up.shape[1]):
                bits[i] = np.uint32(up[j, i]) << np.uint32(16)
            total = up_bias[j]
            for i in range(up.shape[1]):
                total += row[i] * x[token, i]
            hidden[j] = max(total, np.float32(0))
        for e in range(down.shape[0]):
            total = down_bias[e]
            for j in range(down.shape[1]):
                total += down[e, j] * hidden[j]
            scores[token, e] = total


class LearnedPredictor(InputPredictor):
    """Predictor `learned`: trained networks from a file, which do not learn at run time."""

    name, costly = "learned", True

    def __init__(self, setup: PredictorSetup) -> None:
        if setup.tensors is None:
            raise UsageError(
                "predictor learned needs a file of `greenroom train-predictor`, and works only with"
                " the model for which it was trained"
            )
        super().__init__(setup)
        self._networks, self._ahead = networks_of(setup.tensors, setup.shape)
        self.distance = self._ahead
        self._by_gate = gate_layers(setup.tensors, setup.shape)
        if self._by_gate and setup.gates is None:
            raise UsageError(
                "the file of the predictor learned lets next-gate predict some layers, which needs"
                " the model's routers: train one without --next-gate"
            )
        self._gates = setup.gates

    def predict(self, layer: int) -> list[LayerPrediction]:
        if self._inputs is None:
            return []
        targets = targets_of(layer, self._ahead, self._shape.layers)
        return [LayerPrediction(target, self._rank(target, self._inputs)) for target in targets]

    def _rank(self, target: int, rows: Inputs) -> Ids:
        if target in self._by_gate:
            assert self._gates is not None
            return self._gates.rank(target, rows, self._shape.width)
        ranked: Ids = top(self._scores(self._networks[target], rows), self._shape.width)
        return ranked

    def _scores(self, network: Network, x: Inputs) -> Floats:
        if len(x) > FEW:
            hidden = np.maximum(x @ to_float32(network.up).T + network.up_bias, np.float32(0))
            result: Floats = hidden @ network.down.T + network.down_bias
            return result
        scores = np.empty((len(x), len(network.down)), np.float32)
        forward(np.ascontiguousarray(x), network, scores)
        return scores


def source_of(target: int, distance: int) -> int:
    """Return the layer from whose router's input `learned` predicts a layer (ProMoE, 4.4)."""
    return max(target - distance, 0)


def targets_of(layer: int, distance: int, layers: int) -> range:
    """Return the layers that `learned` predicts from the input of one layer's router."""
    return range(layer + distance if layer else 1, min(layer + distance + 1, layers))


def networks_of(
    tensors: Mapping[str, NDArray[Any]], shape: Shape
) -> tuple[dict[int, Network], int]:
    """Build the networks of the predictor `learned`, one for each layer, from a file's tensors.

    Returns (networks by layer, distance). The first layer has no network. Raises PredictorError if
    tensors are missing or do not fit the model.
    """
    distance = tensors.get("distance", np.empty(0))
    if distance.shape != (1,) or not 1 <= int(distance[0]) < shape.layers:
        raise PredictorError(
            "the file of the learned predictor is damaged or for another model: its tensor"
            f" `distance` is not a number from 1 to {shape.layers - 1}"
        )
    networks: dict[int, Network] = {}
    for layer, experts in enumerate(shape.experts_per_layer[1:], 1):
        parts = [
            tensors.get(f"{layer}.{name}")
            for name in ("up.weight", "up.bias", "down.weight", "down.bias")
        ]
        if any(part is None or part.dtype != np.float32 for part in parts):
            raise PredictorError(
                "the file of the learned predictor is damaged or for another model: it has no"
                f" complete network for MoE layer {layer}"
            )
        up, up_bias, down, down_bias = (np.ascontiguousarray(part) for part in parts)
        hidden = len(up_bias)
        shapes = (up.shape[:1], up_bias.shape, down.shape, down_bias.shape)
        if up.ndim != 2 or shapes != ((hidden,), (hidden,), (experts, hidden), (experts,)):
            raise PredictorError(
                "the learned predictor is for another model: its network for MoE layer"
                f" {layer} does not predict {experts} experts"
            )
        networks[layer] = Network(to_bfloat16(up), up_bias, down, down_bias)
    if f"{shape.layers}.up.bias" in tensors:
        raise PredictorError(
            "the learned predictor is for another model: it has networks for more than"
            f" {shape.layers} MoE layers"
        )
    if len({network.up.shape[1] for network in networks.values()}) > 1:
        raise PredictorError(
            "the file of the learned predictor is damaged: its networks have different input sizes"
        )
    return networks, int(distance[0])


def gate_layers(tensors: Mapping[str, NDArray[Any]], shape: Shape) -> frozenset[int]:
    """Return the layers that a file of `learned` leaves to next-gate; PredictorError if damaged."""
    flags = tensors.get(NEXT_GATE)
    if flags is None:
        return frozenset()
    if flags.shape != (shape.layers,) or flags.dtype != np.uint8 or flags[0] or flags.max() > 1:
        raise PredictorError(
            f"the file of the learned predictor is damaged: its tensor `{NEXT_GATE}` is not a 0 or"
            f" 1 for each of {shape.layers} layers, with 0 for the first"
        )
    return frozenset(np.flatnonzero(flags).tolist())


learned = PredictorKind(
    "learned",
    LearnedPredictor,
    "small networks, trained by `greenroom train-predictor`",
    frozenset({"inputs", "file"}),
)
