"""Training of the expert predictor `learned`, from a routing trace with router inputs.

Each layer's network maps the router's input `distance` layers before to the experts that the token
used. For the first layers this is the input of layer 0's router (ProMoE, section 4.4, footnote 1);
layer 0 itself has no network. Inputs are standardised for training; afterwards the standardisation
is folded into the weights. The loss is the binary cross entropy of each expert's use.

The paper's networks have two layers and about 2 million parameters (4.4); it names no activation,
and the models that it uses have router inputs of 2048 or more values. Greenroom's networks have
ReLU, and a hidden layer of at most 1024 units, about as many as the paper's have for 2048 inputs.
Memory holds the inputs of one layer at a time, for `TrainConfig.tokens` tokens and the tokens of
the test.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from greenroom.config import TrainConfig
from greenroom.config.study import LEAST_TOKENS
from greenroom.core.pieces import Ints
from greenroom.core.ranking import top
from greenroom.errors import TraceError, UsageError
from greenroom.predictors.learned import NEXT_GATE, learned, source_of
from greenroom.predictors.next_gate import next_gate
from greenroom.trace import Trace

BATCH = 128  # tokens
LEARNING_RATE = 2e-3  # of AdamW at the start; it falls to 0 along a half cosine
PARAMETERS = 2_000_000  # of one layer's network, about (ProMoE, 4.4)
MOST_HIDDEN = 1024
HIDDEN_STEP = 16  # hidden sizes are multiples of it

Floats = NDArray[np.float32]
OnLayer = Callable[[int], None]


class TrainingResult(NamedTuple):
    """Result of training the predictor `learned`: the tensors of its file, and its accuracy."""

    tensors: dict[str, NDArray[Any]]
    # Of each predictor, the accuracy of each layer on held-out requests; None for the first layer.
    accuracy: dict[str, list[float | None]]
    hidden: int  # hidden size of the networks
    tokens: int  # number of tokens for training
    held_out: int  # number of tokens for the test


def hidden_size(inputs: int, experts: int) -> int:
    """Return a predictor network's hidden size, for about 2 million parameters at most.

    It is a multiple of 16, from 16 to 1024.
    """
    hidden = PARAMETERS // (inputs + experts + 1) // HIDDEN_STEP * HIDDEN_STEP
    return min(max(hidden, HIDDEN_STEP), MOST_HIDDEN)


def train(
    trace: Trace, config: TrainConfig, device: torch.device, on_layer: OnLayer = lambda done: None
) -> TrainingResult:
    """Train the predictor `learned` on most recorded requests, and test it on the others.

    `on_layer` is called with the number of finished layers. Raises UsageError if the trace has no
    router inputs or too few layers for the distance, TraceError if it has too few tokens or
    requests.
    """
    test = _held_out(trace, config)
    tokens, held_out = int((~test).sum()), int(test.sum())
    if min(tokens, held_out) < LEAST_TOKENS:
        raise TraceError(
            f"the trace has router inputs of {tokens} tokens for training and {held_out} for the"
            f" test: at least {LEAST_TOKENS} of each are needed; record more requests, or a"
            " larger share with --gate-inputs"
        )
    assert trace.gate_inputs is not None
    chosen = np.flatnonzero(~test)
    if config.tokens < tokens:
        chosen = np.sort(np.random.default_rng(config.seed).choice(chosen, config.tokens, False))
    rows = chosen, np.flatnonzero(test)
    inputs, experts = trace.gate_inputs.values.shape[2], int(trace.experts_per_layer.max())
    config = replace(config, hidden=config.hidden or hidden_size(inputs, experts))
    tensors: dict[str, NDArray[Any]] = {"distance": np.array([config.distance])}
    shares: list[dict[str, float]] = []
    by_gate = np.zeros(trace.layers, np.uint8)
    for target in range(1, trace.layers):
        network, shares_of_layer = _train_layer(trace, target, rows, config, device)
        tensors |= {f"{target}.{name}": array for name, array in network.items()}
        shares.append(shares_of_layer)
        if config.next_gate:
            right = _gate_accuracy(trace, target, config.distance, rows[1])
            by_gate[target] = right > shares_of_layer[learned.name]
        on_layer(target + 1)
    if by_gate.any():
        tensors[NEXT_GATE] = by_gate
    accuracy = {name: [None, *(each[name] for each in shares)] for name in shares[0]}
    return TrainingResult(tensors, accuracy, config.hidden or 0, chosen.size, held_out)


def _held_out(trace: Trace, config: TrainConfig) -> NDArray[np.bool_]:
    """Return a mask of the tokens with router inputs, true where their request is held out."""
    if trace.gate_inputs is None:
        raise UsageError("the trace has no router inputs: record it with --gate-inputs 1")
    if trace.layers < 2:
        raise UsageError(
            "the model has one MoE layer: the predictor learned needs at least two, since it"
            " predicts a layer from an earlier one"
        )
    if config.distance >= trace.layers:
        raise UsageError(
            f"--distance {config.distance}: the model has {trace.layers} MoE layers only, so the"
            f" distance can be at most {trace.layers - 1}"
        )
    if config.next_gate and _gate_predictions(trace, config.distance) is None:
        name = f"{next_gate.name}:{config.distance}"
        raise UsageError(
            f"--next-gate: the trace has no predictions of {name}: record it with --predict {name}"
        )
    if trace.requests < 2:
        raise TraceError(
            "the trace has one request: record at least 2, since one is needed to test the training"
        )
    order = np.random.default_rng(config.seed).permutation(trace.requests)
    number = min(trace.requests - 1, max(1, round(config.held_out * trace.requests)))
    chosen = np.zeros(trace.requests, bool)
    chosen[order[:number]] = True
    return np.repeat(chosen, np.diff(trace.request_starts))[trace.gate_inputs.tokens]


def _gate_predictions(trace: Trace, distance: int) -> NDArray[Any] | None:
    """Return the predictions of `next-gate` at a distance in a trace; None if it has none."""
    for name, prediction in trace.predictions.items():
        if name.partition(":")[0] == next_gate.name and prediction.distance == distance:
            return prediction.experts
    return None


def _gate_accuracy(trace: Trace, target: int, distance: int, test: Ints) -> float:
    """Return the accuracy of next-gate for a layer, from the layer that `learned` reads too.

    0 if the trace has no predictions of next-gate at that distance. `test` are positions among the
    tokens with router inputs.
    """
    assert trace.gate_inputs is not None
    predicted = _gate_predictions(trace, target - source_of(target, distance))
    if predicted is None:
        return 0.0
    tokens = trace.gate_inputs.tokens[test]
    ids, used = predicted[tokens, target, : trace.top_k], trace.experts[tokens, target]
    return accuracy(ids.astype(np.int64), used.astype(np.int64))


def _train_layer(
    trace: Trace,
    target: int,
    rows: tuple[Ints, Ints],
    config: TrainConfig,
    device: torch.device,
) -> tuple[dict[str, Floats], dict[str, float]]:
    """Train one layer's predictor network; return its tensors, and each predictor's accuracy.

    `rows` are the positions of the tokens for training and for the test among those with inputs.
    """
    assert trace.gate_inputs is not None
    values, source = trace.gate_inputs.values, source_of(target, config.distance)
    training, test = (trace.gate_inputs.tokens[each] for each in rows)
    learn, used = (trace.experts[each, target].astype(np.int64) for each in (training, test))
    experts = int(trace.experts_per_layer[target])
    network = _fit(values[rows[0], source], learn, experts, config, device)
    hidden = np.maximum(values[rows[1], source] @ network["up.weight"].T + network["up.bias"], 0)
    scores = hidden @ network["down.weight"].T + network["down.bias"]
    popular = np.bincount(learn.reshape(-1), minlength=experts).astype(np.float32)
    predicted = {learned.name: top(scores, trace.top_k)}
    for name, prediction in trace.predictions.items():
        if prediction.distance == config.distance and name != learned.name:
            ids = prediction.experts[test, target, : trace.top_k]
            predicted[name] = ids.astype(np.int64)
    predicted["popularity"] = top(popular[None], trace.top_k)
    return network, {name: accuracy(ids, used) for name, ids in predicted.items()}


def accuracy(predicted: NDArray[np.int64], used: NDArray[np.int64]) -> float:
    """Compute the accuracy of a prediction: the share of used experts that were predicted.

    predicted [tokens, width], used [tokens, top_k]
    """
    return float((used[:, :, None] == predicted[:, None, :]).any(axis=2).mean())


def _fit(
    x: Floats, used: NDArray[np.int64], experts: int, config: TrainConfig, device: torch.device
) -> dict[str, Floats]:
    """Train a network on router inputs x [tokens, hidden], which are standardised in place."""
    assert config.hidden is not None
    torch.manual_seed(config.seed)
    mean, spread = x.mean(axis=0), x.std(axis=0) + 1e-6
    x -= mean
    x /= spread
    inputs = torch.from_numpy(x).to(device)
    targets = torch.zeros(len(used), experts).scatter_(1, torch.from_numpy(used), 1.0).to(device)
    layers = OrderedDict(
        up=nn.Linear(x.shape[1], config.hidden),
        relu=nn.ReLU(),
        down=nn.Linear(config.hidden, experts),
    )
    network = nn.Sequential(layers).to(device)
    batches = -(-len(x) // BATCH)
    optimizer = torch.optim.AdamW(network.parameters(), LEARNING_RATE, weight_decay=0.01)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.epochs * batches)
    random = torch.Generator().manual_seed(config.seed)
    for _ in range(config.epochs):
        for rows in torch.randperm(len(x), generator=random).to(device).split(BATCH):
            loss = nn.functional.binary_cross_entropy_with_logits(
                network(inputs[rows]), targets[rows]
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            falling.step()
    tensors: dict[str, Floats] = {
        name: tensor.detach().cpu().numpy() for name, tensor in network.named_parameters()
    }
    scaled = tensors["up.weight"] / spread  # so inputs of the trained network are not standardised
    shift = tensors["up.bias"] - scaled @ mean
    return {**tensors, "up.weight": scaled, "up.bias": shift}


def result_metadata(
    trace: Trace, config: TrainConfig, trained: TrainingResult
) -> Mapping[str, Any]:
    """Return the metadata of a trained predictor's file: model, settings and accuracy."""
    return {
        "model": trace.meta.get("model", "not named"),
        "distance": config.distance,
        "hidden": trained.hidden,
        "epochs": config.epochs,
        "seed": config.seed,
        "tokens": trained.tokens,
        "held_out": trained.held_out,
        "next_gate": np.flatnonzero(trained.tensors.get(NEXT_GATE, ())).tolist(),
        "accuracy": trained.accuracy,
    }
