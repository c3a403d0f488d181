"""Training of the expert predictor `learned`, from a routing trace with router inputs.

Each layer's network maps the router's input `distance` layers before to the experts that the token
used. For the first layers the networks map the inputs of the last layers' routers to the experts of
the next token. Inputs are standardised for training; afterwards the standardisation is folded into
the weights. The loss is the binary cross entropy of each expert's use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from greenroom.config import TrainConfig
from greenroom.core.pieces import Ints
from greenroom.core.ranking import top
from greenroom.errors import TraceError, UsageError
from greenroom.trace import Trace

BATCH = 128  # tokens
LEARNING_RATE = 2e-3  # of AdamW at the start; it falls to 0 along a half cosine
LEAST_TOKENS = 50  # tokens, for training and for the test

Floats = NDArray[np.float32]
OnLayer = Callable[[int], None]


class TrainingResult(NamedTuple):
    """Result of training the predictor `learned`: the tensors of its file, and its accuracy."""

    tensors: dict[str, NDArray[Any]]
    accuracy: dict[str, list[float]]  # predictor -> accuracy of each layer on held-out requests
    tokens: int  # number of tokens for training
    held_out: int  # number of tokens for the test


class TrainingPairs(NamedTuple):
    """Training data of one layer's predictor network: router inputs and the tokens to predict."""

    source: int  # the layer of the router whose inputs are used
    rows: Ints  # [n] positions of the inputs among the sampled tokens
    tokens: Ints  # [n] the tokens whose experts are predicted


def pairs_of(trace: Trace, target: int, distance: int) -> TrainingPairs:
    """Make the training data of the predictor `learned` for the layer `target`.

    The input is that of the router `distance` layers before. For the first layers this is a router
    at the end of the previous token, if both tokens belong to one request.
    """
    assert trace.gate_inputs is not None
    tokens = trace.gate_inputs.tokens
    back, source = divmod(target - distance, trace.layers)
    if back == 0:
        return TrainingPairs(source, np.arange(len(tokens)), tokens)
    after = tokens + 1
    begins = np.isin(after, trace.request_starts)  # including the end of the trace
    return TrainingPairs(source, np.flatnonzero(~begins), after[~begins])


def train(
    trace: Trace, config: TrainConfig, device: torch.device, on_layer: OnLayer = lambda done: None
) -> TrainingResult:
    """Train the predictor `learned` on most recorded requests, and test it on the others.

    `on_layer` is called with the number of finished layers. Raises UsageError if the trace has no
    router inputs or fewer layers than the distance, TraceError if it has too few tokens or
    requests.
    """
    held_out = _held_out(trace, config)
    tensors: dict[str, NDArray[Any]] = {"distance": np.array([config.distance])}
    shares: list[dict[str, float]] = []
    counts = [0, 0]
    for target in range(trace.layers):
        pairs = pairs_of(trace, target, config.distance)
        test = held_out[pairs.tokens]
        now = int((~test).sum()), int(test.sum())
        if min(now) < LEAST_TOKENS:
            raise TraceError(
                f"the trace has router inputs of {now[0]} tokens for training and {now[1]} for the"
                f" test: at least {LEAST_TOKENS} of each are needed; record more requests, or a"
                " larger share with --gate-inputs"
            )
        counts = [max(n, most) for n, most in zip(now, counts, strict=True)]
        network, shares_of_layer = _train_layer(trace, target, pairs, test, config, device)
        tensors |= {f"{target}.{name}": array for name, array in network.items()}
        shares.append(shares_of_layer)
        on_layer(target + 1)
    accuracy = {name: [each[name] for each in shares] for name in shares[0]}
    return TrainingResult(tensors, accuracy, *counts)


def _held_out(trace: Trace, config: TrainConfig) -> NDArray[np.bool_]:
    """Return a mask [tokens] of the tokens whose request is held out for the test."""
    if trace.gate_inputs is None:
        raise UsageError("the trace has no router inputs: record it with --gate-inputs 1")
    if config.distance > trace.layers:
        raise UsageError(
            f"--distance {config.distance}: the model has {trace.layers} MoE layers only, so the"
            f" distance can be at most {trace.layers}"
        )
    if trace.requests < 2:
        raise TraceError(
            "the trace has one request: record at least 2, since one is needed to test the training"
        )
    order = np.random.default_rng(config.seed).permutation(trace.requests)
    number = min(trace.requests - 1, max(1, round(config.held_out * trace.requests)))
    chosen = np.zeros(trace.requests, bool)
    chosen[order[:number]] = True
    return np.repeat(chosen, np.diff(trace.request_starts))


def _train_layer(
    trace: Trace,
    target: int,
    pairs: TrainingPairs,
    test: NDArray[np.bool_],
    config: TrainConfig,
    device: torch.device,
) -> tuple[dict[str, Floats], dict[str, float]]:
    """Train one layer's predictor network; return its tensors, and each predictor's accuracy."""
    assert trace.gate_inputs is not None
    x = np.ascontiguousarray(trace.gate_inputs.values[pairs.rows, pairs.source])
    used = trace.experts[pairs.tokens, target].astype(np.int64)
    experts = int(trace.experts_per_layer[target])
    network = _fit(x[~test], used[~test], experts, config, device)
    hidden = np.maximum(x[test] @ network["up.weight"].T + network["up.bias"], 0)
    scores = hidden @ network["down.weight"].T + network["down.bias"]
    popular = np.bincount(used[~test].reshape(-1), minlength=experts).astype(np.float32)
    predicted = {"learned": top(scores, trace.top_k)}
    for name, prediction in trace.predictions.items():
        if prediction.distance == config.distance:
            predicted[name] = prediction.experts[pairs.tokens[test], target, : trace.top_k].astype(
                np.int64
            )
    predicted["popularity"] = top(popular[None], trace.top_k)
    return network, {name: accuracy(ids, used[test]) for name, ids in predicted.items()}


def accuracy(predicted: NDArray[np.int64], used: NDArray[np.int64]) -> float:
    """Compute the accuracy of a prediction: the share of used experts that were predicted.

    predicted [tokens, width], used [tokens, top_k]
    """
    return float((used[:, :, None] == predicted[:, None, :]).any(axis=2).mean())


def _fit(
    x: Floats, used: NDArray[np.int64], experts: int, config: TrainConfig, device: torch.device
) -> dict[str, Floats]:
    torch.manual_seed(config.seed)
    mean, spread = x.mean(axis=0), x.std(axis=0) + 1e-6
    inputs = torch.from_numpy((x - mean) / spread).to(device)
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
        "hidden": config.hidden,
        "epochs": config.epochs,
        "seed": config.seed,
        "tokens": trained.tokens,
        "held_out": trained.held_out,
        "accuracy": trained.accuracy,
    }
