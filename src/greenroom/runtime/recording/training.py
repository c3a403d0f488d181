"""Train the networks of the predictor `learned` from a recording that holds gate inputs.

For each layer: what entered the gate `distance` layers before -> the experts that the token used;
for the first layers what entered the last gates -> what the token after it used. The inputs are
standardised, which the weights then take over; the loss is that each expert's score says whether
it is used (binary cross entropy).
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
RATE = 2e-3  # of AdamW at its highest; it falls to 0 along a half cosine
LEAST = 50  # tokens, to learn from and to judge by

Floats = NDArray[np.float32]
OnLayer = Callable[[int], None]


class TrainingResult(NamedTuple):
    """The tensors of a predictor's file, and how good they are."""

    tensors: dict[str, NDArray[Any]]
    accuracy: dict[str, list[float]]  # predictor -> share a layer, on the requests held out
    tokens: int  # learned from
    held_out: int  # tokens judged by


class TrainingPairs(NamedTuple):
    """What a layer's network learns from: the rows of gate inputs, and the tokens they speak of."""

    source: int  # the layer whose gate inputs they are
    rows: Ints  # [n] positions among the sampled tokens
    tokens: Ints  # [n] whose experts are asked for


def pairs_of(trace: Trace, target: int, distance: int) -> TrainingPairs:
    """All that a trace says of one layer at one distance.

    Below the first layer the input is that of the token before: its last gates', where both are
    of one request.
    """
    assert trace.gate_inputs is not None
    tokens = trace.gate_inputs.tokens
    back, source = divmod(target - distance, trace.layers)
    if back == 0:
        return TrainingPairs(source, np.arange(len(tokens)), tokens)
    after = tokens + 1
    begins = np.isin(after, trace.request_starts)  # so does the end of the trace
    return TrainingPairs(source, np.flatnonzero(~begins), after[~begins])


def train(
    trace: Trace, config: TrainConfig, device: torch.device, on_layer: OnLayer = lambda done: None
) -> TrainingResult:
    """Train on most requests, and judge by the others.

    `on_layer` is told how many layers are done. UsageError or TraceError where the trace cannot
    teach: no gate inputs, too few tokens or requests, or fewer layers than the distance.
    """
    held = _held_out(trace, config)
    tensors: dict[str, NDArray[Any]] = {"distance": np.array([config.distance])}
    shares: list[dict[str, float]] = []
    counts = [0, 0]
    for target in range(trace.layers):
        pairs = pairs_of(trace, target, config.distance)
        test = held[pairs.tokens]
        now = int((~test).sum()), int(test.sum())
        if min(now) < LEAST:
            raise TraceError(
                f"{now[0]} tokens to learn from and {now[1]} to judge by: a recording needs"
                f" {LEAST} of each with gate inputs"
            )
        counts = [max(n, most) for n, most in zip(now, counts, strict=True)]
        network, found = _train_layer(trace, target, pairs, test, config, device)
        tensors |= {f"{target}.{name}": array for name, array in network.items()}
        shares.append(found)
        on_layer(target + 1)
    accuracy = {name: [each[name] for each in shares] for name in shares[0]}
    return TrainingResult(tensors, accuracy, *counts)


def _held_out(trace: Trace, config: TrainConfig) -> NDArray[np.bool_]:
    """[tokens] whether a token's request is held out."""
    if trace.gate_inputs is None:
        raise UsageError("the trace has no gate inputs: record it with --gate-inputs 1")
    if config.distance > trace.layers:
        raise UsageError(
            f"--distance {config.distance}: the model has {trace.layers} MoE layers only"
        )
    if trace.requests < 2:
        raise TraceError("a recording of one request: nothing is left to judge the training by")
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
    """(the network's tensors, accuracy by predictor) of one layer."""
    assert trace.gate_inputs is not None
    x = np.ascontiguousarray(trace.gate_inputs.values[pairs.rows, pairs.source])
    used = trace.experts[pairs.tokens, target].astype(np.int64)
    experts = int(trace.experts_per_layer[target])
    network = _fit(x[~test], used[~test], experts, config, device)
    hidden = np.maximum(x[test] @ network["up.weight"].T + network["up.bias"], 0)
    scores = hidden @ network["down.weight"].T + network["down.bias"]
    popular = np.bincount(used[~test].reshape(-1), minlength=experts).astype(np.float32)
    said = {"learned": top(scores, trace.top_k)}
    for name, made in trace.predictions.items():
        if made.distance == config.distance:
            said[name] = made.experts[pairs.tokens[test], target, : trace.top_k].astype(np.int64)
    said["popularity"] = top(popular[None], trace.top_k)
    return network, {name: accuracy(ids, used[test]) for name, ids in said.items()}


def accuracy(said: NDArray[np.int64], used: NDArray[np.int64]) -> float:
    """The share of the experts used, [T, K], that were among those said, [T, k]."""
    return float((used[:, :, None] == said[:, None, :]).any(axis=2).mean())


def _fit(
    x: Floats, used: NDArray[np.int64], experts: int, config: TrainConfig, device: torch.device
) -> dict[str, Floats]:
    torch.manual_seed(config.seed)
    mean, spread = x.mean(axis=0), x.std(axis=0) + 1e-6
    inputs = torch.from_numpy((x - mean) / spread).to(device)
    wanted = torch.zeros(len(used), experts).scatter_(1, torch.from_numpy(used), 1.0).to(device)
    layers = OrderedDict(
        up=nn.Linear(x.shape[1], config.hidden),
        relu=nn.ReLU(),
        down=nn.Linear(config.hidden, experts),
    )
    network = nn.Sequential(layers).to(device)
    batches = -(-len(x) // BATCH)
    optimizer = torch.optim.AdamW(network.parameters(), RATE, weight_decay=0.01)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.epochs * batches)
    random = torch.Generator().manual_seed(config.seed)
    for _ in range(config.epochs):
        for rows in torch.randperm(len(x), generator=random).to(device).split(BATCH):
            loss = nn.functional.binary_cross_entropy_with_logits(
                network(inputs[rows]), wanted[rows]
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            falling.step()
    tensors: dict[str, Floats] = {
        name: tensor.detach().cpu().numpy() for name, tensor in network.named_parameters()
    }
    scaled = tensors["up.weight"] / spread  # so that inputs need not be standardised
    shift = tensors["up.bias"] - scaled @ mean
    return {**tensors, "up.weight": scaled, "up.bias": shift}


def result_metadata(
    trace: Trace, config: TrainConfig, trained: TrainingResult
) -> Mapping[str, Any]:
    """What a predictor's file says of itself."""
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
