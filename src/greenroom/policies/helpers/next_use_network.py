"""The network of NEXT-USE: it corrects the estimates, and is trained on recorded routing.

NEXT-USE learns from the present text alone. The network knows what other texts were like: it was
trained, with the optimal values as targets, on many requests of the model
(`runtime/recording/policy_training.py`). At each step of a layer it adds to the sum from which an
expert's value is computed

    output . relu(hidden) + constant + linear . features
    + units . softsign(weights . features + offsets)

where softsign(x) = x / (1 + |x|). The features of an expert are that sum and NEXT-USE's four terms.
The *hidden* vector of a step adds up vectors of experts, whose mean counts:

  - those that this pass used in all layers so far, and once more those of this layer;
  - those that the pass before used in this layer;
  - the *past*, the state of a gated recurrent unit (Cho et al., 2014) that reads one sum of vectors
    a pass, and is zero when a request begins.

So the routing so far, which says much about the text, is mapped to all experts of a layer. LRB and
HALP train models of next uses for other caches (Song et al., 2020; Song et al., 2023).
"""

from __future__ import annotations

from math import exp, sqrt, tanh
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from greenroom.core.pieces import Ints
from greenroom.core.policy import Arrays, Floats, Ids, Weights, compiled
from greenroom.policies.helpers.learned import array_of

HIDDEN = 128
FEATURES = 5  # the sum, and NEXT-USE's terms
UNITS = 8  # of each layer's small network over an expert's features
PREFIX = "network."  # of the names of stored arrays
SO_FAR, STEP, BEFORE = range(3)
RESET, UPDATE, NEW = range(3)
ONE = np.float32(1.0)
EDGE = 1e-6  # values nearer to 0 or 1 count as this
MOST = 1e4  # magnitude of trained weights; with these no sum overflows


class Network(NamedTuple):
    """Trained weights of NEXT-USE's network, and its state in the present pass.

    L layers, E experts, H hidden values, U units, F features.
    """

    vectors: (
        Weights  # [L, E, 3, H] of an expert: in the pass so far, of this layer, one pass before
    )
    recurrent: Weights  # [L, H, H] from the past to the hidden vector
    offset: Weights  # [L, H]
    output: Weights  # [L, H, E]
    constant: Weights  # [L, E]
    linear: Weights  # [L, F]
    feature_weights: Weights  # [L, F, U]
    feature_offsets: Weights  # [L, U]
    units: Weights  # [L, U]
    gates_input: Weights  # [3, H, H] of the recurrent unit, from a pass to each gate
    gates_past: Weights  # [3, H, H]
    gates_input_offset: Weights  # [3, H]
    gates_past_offset: Weights  # [3, H]
    trained: Ints  # [1] 1 where there are trained weights
    layer: Ints  # [1] of the last step; -1: none in this request
    sets: Ints  # [L, E] experts of a layer's last step
    set_sizes: Ints  # [L]
    so_far: Weights  # [H] sum of vectors of the present pass
    past: Weights  # [H]
    hidden: Weights  # [H] of the step
    gates: Weights  # [2, 3, H] scratch
    unit: Weights  # [E] scratch
    sums: Weights  # [E] corrected sums of the step


TRAINED = Network._fields[: Network._fields.index("trained")]


def shapes(layers: int, experts: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a network's trained arrays, by name."""
    each, square = (layers, experts), (HIDDEN, HIDDEN)
    return {
        "vectors": (*each, 3, HIDDEN),
        "recurrent": (layers, *square),
        "offset": (layers, HIDDEN),
        "output": (layers, HIDDEN, experts),
        "constant": each,
        "linear": (layers, FEATURES),
        "feature_weights": (layers, FEATURES, UNITS),
        "feature_offsets": (layers, UNITS),
        "units": (layers, UNITS),
        "gates_input": (3, *square),
        "gates_past": (3, *square),
        "gates_input_offset": (3, HIDDEN),
        "gates_past_offset": (3, HIDDEN),
    }


def empty(layers: int, experts: int) -> Network:
    """Create a network without trained weights; their pages take no memory until they are set."""
    return Network(
        **{name: np.zeros(shape, np.float32) for name, shape in shapes(layers, experts).items()},
        trained=np.zeros(1, np.int64),
        layer=np.full(1, -1, np.int64),
        sets=np.zeros((layers, experts), np.int64),
        set_sizes=np.zeros(layers, np.int64),
        so_far=np.zeros(HIDDEN, np.float32),
        past=np.zeros(HIDDEN, np.float32),
        hidden=np.zeros(HIDDEN, np.float32),
        gates=np.zeros((2, 3, HIDDEN), np.float32),
        unit=np.zeros(experts, np.float32),
        sums=np.zeros(experts, np.float32),
    )


@compiled
def begin_request(network: Network) -> None:
    """Forget the passes of the request before."""
    network.layer[0] = -1
    network.so_far[:] = np.float32(0.0)
    network.past[:] = np.float32(0.0)
    network.set_sizes[:] = 0


@compiled
def observe(network: Network, layer: int, pieces: Ids, begin: int) -> None:
    """Compute the hidden vector of a layer's step from its experts and from earlier steps."""
    if layer <= network.layer[0]:
        _end_pass(network)
    network.layer[0] = layer
    for h in range(HIDDEN):
        network.hidden[h] = network.offset[layer, h]
    _multiply(network.past, network.recurrent[layer], network.hidden)
    before = network.set_sizes[layer]
    for j in range(before):
        _add(network, layer, network.sets[layer, j], BEFORE, before, network.hidden)
    for j in range(pieces.size):
        expert = pieces[j] - begin
        network.sets[layer, j] = expert
        _add(network, layer, expert, SO_FAR, pieces.size, network.so_far)
        _add(network, layer, expert, STEP, pieces.size, network.hidden)
    network.set_sizes[layer] = pieces.size
    for h in range(HIDDEN):
        network.hidden[h] = max(network.hidden[h] + network.so_far[h], np.float32(0.0))


@compiled
def _add(network: Network, layer: int, expert: int, kind: int, size: int, sums: Weights) -> None:
    """Add an expert's vector of a kind to a sum; a set of `size` experts counts as their mean."""
    share = ONE / np.float32(size)
    for h in range(HIDDEN):
        sums[h] += share * network.vectors[layer, expert, kind, h]


@compiled
def _multiply(vector: Weights, matrix: Weights, sums: Weights) -> None:
    """Add the product of a vector and a matrix, [rows] and [rows, columns], to sums."""
    for row in range(vector.size):
        factor = vector[row]
        if factor != 0:
            for column in range(sums.size):
                sums[column] += factor * matrix[row, column]


@compiled
def _end_pass(network: Network) -> None:
    """Let the recurrent unit read the pass, and begin another one."""
    for gate in range(3):
        for h in range(HIDDEN):
            network.gates[0, gate, h] = network.gates_input_offset[gate, h]
            network.gates[1, gate, h] = network.gates_past_offset[gate, h]
        _multiply(network.so_far, network.gates_input[gate], network.gates[0, gate])
        _multiply(network.past, network.gates_past[gate], network.gates[1, gate])
    by_input, by_past = network.gates[0], network.gates[1]
    for h in range(HIDDEN):
        reset = 1.0 / (1.0 + exp(-(by_input[RESET, h] + by_past[RESET, h])))
        update = 1.0 / (1.0 + exp(-(by_input[UPDATE, h] + by_past[UPDATE, h])))
        new = tanh(by_input[NEW, h] + reset * by_past[NEW, h])
        network.past[h] = (1.0 - update) * new + update * network.past[h]
        network.so_far[h] = np.float32(0.0)


@compiled
def score_of(value: float) -> float:
    """Return the sum of terms from which NEXT-USE has computed a value."""
    centred = 2.0 * min(max(value, EDGE), 1.0 - EDGE) - 1.0
    score: float = 2.0 * np.divide(centred, sqrt(1.0 - centred * centred))
    return score


@compiled
def correct(network: Network, layer: int, experts: int, values: Floats, features: Floats) -> None:
    """Write the corrected sums of a layer's experts.

    values: the estimates, [E]; features: NEXT-USE's terms of the estimates, [F - 1, E]
    """
    for i in range(experts):
        score = score_of(values[i])
        network.sums[i] = network.constant[layer, i] + np.float32(
            (1.0 + network.linear[layer, 0]) * score
            + network.linear[layer, 1] * features[0, i]
            + network.linear[layer, 2] * features[1, i]
            + network.linear[layer, 3] * features[2, i]
            + network.linear[layer, 4] * features[3, i]
        )
        network.unit[i] = np.float32(score)
    for h in range(HIDDEN):
        factor = network.hidden[h]
        if factor > 0:
            for i in range(experts):
                network.sums[i] += factor * network.output[layer, h, i]
    weights = network.feature_weights[layer]
    for unit in range(UNITS):
        offset, factor = network.feature_offsets[layer, unit], network.units[layer, unit]
        for i in range(experts):
            x = offset + weights[0, unit] * network.unit[i] + np.float32(
                weights[1, unit] * features[0, i] + weights[2, unit] * features[1, i]
                + weights[3, unit] * features[2, i] + weights[4, unit] * features[3, i]
            )  # fmt: skip
            network.sums[i] += factor * (x / (ONE + abs(x)))


def export(network: Network) -> Arrays:
    """Export copies of the trained arrays, by their names in the policy's learned state."""
    if not network.trained[0]:
        return {}
    return {PREFIX + name: getattr(network, name).copy() for name in TRAINED}


def check(network: Network, arrays: Arrays) -> dict[str, NDArray[Any]]:
    """Return the trained arrays of a learned state, if any; ValueError if they are wrong."""
    if not any(name.startswith(PREFIX) for name in arrays):
        return {}
    layers, experts = network.constant.shape
    return {
        name: array_of(arrays, PREFIX + name, shape, np.float32, -MOST, MOST)
        for name, shape in shapes(layers, experts).items()
    }


def restore(network: Network, arrays: Arrays) -> None:
    """Put trained arrays into a network, or none; the next step begins a request."""
    for name, array in arrays.items():
        getattr(network, name)[...] = array
    network.trained[:] = bool(arrays)
    network.layer[:] = -1
    for array in (network.so_far, network.past, network.set_sizes):
        array[:] = 0
