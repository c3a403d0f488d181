"""Routing forced from a recording: its locality at a real model's sizes.

    recording = prepared(load("olmoe-1b-7b.npz"), layers=8)
    with forced(model, recording) as routing:
        seconds = routing.play()

Every MoE block's router computes as ever; then its choice is replaced by the recording's experts
for these tokens (by their place in the recording), with gate weights of 1 / top-k.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from greenroom.errors import UsageError
from greenroom.trace import Trace
from greenroom.trace.trace import starts_of


def prepared(trace: Trace, layers: int, vocabulary: int) -> Trace:
    """Cut a recording for a replay: first layers, fixed gate weights, ids below the vocabulary.

    Token ids are numbered anew: equal ids stay equal, different ones different. In a recording
    without ids the tokens differ until the vocabulary is used up. Raises UsageError if the
    recording has too few layers or too many different tokens.
    """
    if layers > trace.layers:
        raise UsageError(
            f"the recording has {trace.layers} layers: too few for the checkpoint's {layers}"
        )
    if trace.token_ids is None:
        ids = np.arange(trace.tokens) % vocabulary
    else:
        ids = np.unique(trace.token_ids, return_inverse=True)[1]
    if ids.max() >= vocabulary:
        raise UsageError(
            f"the recording has {ids.max() + 1} different tokens: the checkpoint's vocabulary has"
            f" {vocabulary}"
        )
    weight = torch.tensor(1 / trace.top_k).bfloat16().item()  # what a model in bf16 makes of it
    return replace(
        trace,
        experts=np.ascontiguousarray(trace.experts[:, :layers]),
        experts_per_layer=trace.experts_per_layer[:layers],
        weights=np.full((trace.tokens, layers, trace.top_k), weight, np.float16),
        token_ids=ids.astype(np.int32),
        predictions={},
        gate_inputs=None,
    )


def cut(trace: Trace, tokens: int) -> Trace:
    """Cut every request of a recording to its first tokens.

    A pass may be cut short. Requests with fewer tokens are left out.
    """
    lengths = np.diff(trace.request_starts)
    trace = trace.select(np.flatnonzero(lengths >= tokens))
    starts = trace.request_starts
    positions = (starts[:-1, None] + np.arange(tokens)).ravel()
    forced_experts = (
        trace.pass_starts[:-1] - np.repeat(starts[:-1], np.diff(starts))[trace.pass_starts[:-1]]
    )
    passes = forced_experts < tokens
    lengths = np.minimum(np.diff(trace.pass_starts), tokens - forced_experts)[passes]
    assert trace.weights is not None
    assert trace.token_ids is not None
    return replace(
        trace,
        experts=trace.experts[positions],
        weights=trace.weights[positions],
        token_ids=trace.token_ids[positions],
        request_starts=starts_of(np.full(trace.requests, tokens)),
        pass_starts=starts_of(lengths),
        pass_prefill=trace.pass_prefill[passes],
    )


def with_prompts(trace: Trace, tokens: int) -> Trace:
    """The recording with the first tokens of every request as one prefill pass."""
    lengths = np.diff(trace.request_starts)
    prompts = np.minimum(tokens, lengths)
    passes = [np.r_[p, np.ones(n - p, np.int64)] for p, n in zip(prompts, lengths, strict=True)]
    prefill = [np.r_[True, np.zeros(len(each) - 1, bool)] for each in passes]
    return replace(
        trace,
        pass_starts=starts_of(np.concatenate(passes)),
        pass_prefill=np.concatenate(prefill),
    )


def batched(trace: Trace, size: int) -> Trace:
    """Batch requests of equal length, `size` at a time.

    A pass has the next token of each request of a batch. Raises UsageError if the lengths differ or
    there are too few requests.
    """
    lengths = set(np.diff(trace.request_starts).tolist())
    if len(lengths) != 1:
        raise UsageError(
            f"the requests have {min(lengths)} to {max(lengths)} tokens: a batch needs one length"
        )
    length, groups = lengths.pop(), trace.requests // size
    if not groups:
        raise UsageError(f"the recording has {trace.requests} requests: a batch needs {size}")
    order = np.arange(groups * size * length).reshape(groups, size, length).transpose(0, 2, 1)
    order = order.ravel()
    assert trace.weights is not None
    assert trace.token_ids is not None
    return replace(
        trace,
        experts=np.ascontiguousarray(trace.experts[order]),
        weights=trace.weights[order],
        token_ids=trace.token_ids[order],
        labels=trace.labels[: groups * size : size] if trace.labels else trace.labels,
        request_starts=starts_of(np.full(groups, size * length)),
        pass_starts=starts_of(np.full(groups * length, size)),
        pass_prefill=np.zeros(groups * length, bool),
    )


class Routing:
    """Forces a model's routers to choose the experts of a recording, and plays its passes."""

    def __init__(self, model: nn.Module, trace: Trace) -> None:
        assert trace.weights is not None
        assert trace.token_ids is not None
        self.model, self.trace = model, trace
        # [layers, tokens, top_k]: what a router returns for a pass is a view
        self._experts = torch.from_numpy(trace.experts.transpose(1, 0, 2).astype(np.int64))
        self._weights = torch.from_numpy(trace.weights.transpose(1, 0, 2).copy())
        self._ids = torch.from_numpy(trace.token_ids.astype(np.int64))
        self._now = slice(0, 0)  # tokens of the pass under way
        self._cache: Any = None  # keys and values of the request under way

    def listener(self, layer: int) -> Any:
        """Make a router's hook that returns (logits, weights, experts) of the recording."""

        def choose(module: nn.Module, args: Any, output: Any) -> tuple[torch.Tensor, ...]:
            logits, weights, _ = output
            chosen = self._experts[layer, self._now]
            return logits, self._weights[layer, self._now].to(weights.dtype), chosen

        return choose

    @torch.no_grad()
    def play(self, passes: range | None = None) -> list[float]:
        """Seconds of each pass of the recording (all by default).

        Passes must follow those played last, or begin a request.
        """
        trace, seconds = self.trace, []
        begins = set(trace.request_starts.tolist())
        for number in range(trace.passes) if passes is None else passes:
            first, last = trace.pass_starts[number : number + 2].tolist()
            if first in begins:
                self._cache = None
            self._now = slice(first, last)
            ids = self._ids[None, first:last]
            if not trace.pass_prefill[number]:  # the next token of each of several requests
                ids = ids.T
            start = time.perf_counter()
            out = self.model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
            seconds.append(time.perf_counter() - start)
            self._cache = out.past_key_values
        return seconds


@contextmanager
def forced(model: Any, trace: Trace, layers: Sequence[str] | None = None) -> Iterator[Routing]:
    """Context in which the model's routers choose the experts of the trace.

    `layers` are the names of the experts modules, of a model that Greenroom is not attached to.
    """
    routing = Routing(model, trace)
    names = model_layers(model) if layers is None else layers
    blocks = [model.get_submodule(name.rpartition(".")[0]) for name in names]
    if len(blocks) != trace.layers:
        raise UsageError(
            f"the model has {len(blocks)} MoE layers, the recording {trace.layers}: they must match"
        )
    hooks = [
        block.gate.register_forward_hook(routing.listener(layer))
        for layer, block in enumerate(blocks)
    ]
    try:
        yield routing
    finally:
        for hook in hooks:
            hook.remove()


def model_layers(model: Any) -> tuple[str, ...]:
    """Names of the experts modules of a model that Greenroom has loaded."""
    return model.greenroom.setup.catalog.layers
