"""Trace of routing: the experts that each token used, by pass and by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.pieces import Ints
from greenroom.errors import TraceError

Experts = NDArray[Any]  # uint8 or uint16
MOST_EXPERTS = 1 << 16  # in a layer
_BLOCK = 1 << 16  # tokens checked at a time, which bounds the memory of a check


@dataclass(frozen=True, eq=False)
class GateInputs:
    """Recorded hidden states that a sample of the tokens gave to the experts."""

    tokens: Ints  # [S] ascending
    values: NDArray[np.float32]  # [S, layers, hidden]


@dataclass(frozen=True, eq=False)
class Prediction:
    """Recorded predictions of experts, made `distance` layers ahead, likeliest expert first.

    The largest id of the type (255 or 65535) means that there was no prediction.
    """

    experts: Experts  # [tokens, layers, width] ids within the layer
    distance: int


@dataclass(frozen=True, eq=False)
class Trace:
    """Trace of the experts that tokens used, in P passes of R requests.

    Arrays may be read-only views of a mapped file.

    `experts` are ids within their layer, in recorded order (rank order where the gate gives one).
    The tokens of a request are adjacent, and so are those of a pass; a request begins with a pass.
    `weights` are gate weights. TraceError where any of this does not hold.
    """

    experts: Experts  # [tokens, layers, top_k]
    experts_per_layer: Ints  # [layers]
    request_starts: Ints  # [R + 1] token offsets
    pass_starts: Ints  # [P + 1] token offsets
    pass_prefill: NDArray[np.bool_]  # [P]
    labels: tuple[str, ...]  # [R]
    weights: NDArray[np.float16] | None = None  # [tokens, layers, top_k]
    token_ids: NDArray[np.int32] | None = None  # [tokens]
    gate_inputs: GateInputs | None = None
    predictions: dict[str, Prediction] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self)

    @property
    def tokens(self) -> int:
        return len(self.experts)

    @property
    def layers(self) -> int:
        return int(self.experts.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.experts.shape[2])

    @property
    def requests(self) -> int:
        return len(self.request_starts) - 1

    @property
    def passes(self) -> int:
        return len(self.pass_starts) - 1

    @cached_property
    def offsets(self) -> Ints:
        """Return each layer's first dense id, [layers + 1].

        An expert's dense id is `offsets[layer] + expert`.
        """
        return starts_of(self.experts_per_layer)

    @cached_property
    def first_passes(self) -> Ints:
        """Return the first pass of each request, then the number of passes: [R + 1]."""
        return np.searchsorted(self.pass_starts, self.request_starts)

    @cached_property
    def pass_requests(self) -> Ints:
        """Return the request of each pass in a trace, [P]."""
        return np.repeat(np.arange(self.requests), np.diff(self.first_passes))

    def uses(self, begin: int = 0, end: int | None = None) -> Ints:
        """Count how many tokens of a range used each expert: [experts of all layers].

        The range is begin .. end.
        """
        part = self.experts[begin:end]
        return np.concatenate([
            np.bincount(part[:, layer].ravel(), minlength=int(experts))
            for layer, experts in enumerate(self.experts_per_layer)
        ])  # fmt: skip

    def select(self, requests: Sequence[int] | NDArray[np.integer[Any]]) -> Trace:
        """Build a trace of the selected requests, in the given order."""
        chosen = np.asarray(requests, np.int64).reshape(-1)
        if chosen.size == 0:
            raise TraceError("a trace needs at least one request, got none")
        if chosen.min() < 0 or chosen.max() >= self.requests:
            raise TraceError(f"there are {self.requests} requests, counted from 0")
        tokens = _ranges(self.request_starts, chosen)
        passes = _ranges(self.first_passes, chosen)
        return replace(
            self,
            **self._rows(tokens),
            request_starts=starts_of(np.diff(self.request_starts)[chosen]),
            pass_starts=starts_of(np.diff(self.pass_starts)[passes]),
            pass_prefill=self.pass_prefill[passes],
            labels=tuple(self.labels[r] for r in chosen.tolist()),
        )

    def head(self, tokens: int) -> Trace:
        """Build a trace of the first tokens; its last request may be cut short.

        So may its last pass.
        """
        if tokens < 1:
            raise TraceError(f"a trace needs at least one token, got {tokens}")
        if tokens >= self.tokens:
            return self
        requests = int(np.searchsorted(self.request_starts, tokens))
        passes = int(np.searchsorted(self.pass_starts, tokens))
        return replace(
            self,
            **self._rows(slice(tokens)),
            request_starts=np.append(self.request_starts[:requests], tokens),
            pass_starts=np.append(self.pass_starts[:passes], tokens),
            pass_prefill=self.pass_prefill[:passes],
            labels=self.labels[:requests],
        )

    def _rows(self, tokens: slice | Ints) -> dict[str, Any]:
        """Select rows from a trace's arrays that have a row for each token."""
        rows: dict[str, Any] = {
            "experts": self.experts[tokens],
            "weights": None if self.weights is None else self.weights[tokens],
            "token_ids": None if self.token_ids is None else self.token_ids[tokens],
            "predictions": {
                name: replace(prediction, experts=prediction.experts[tokens])
                for name, prediction in self.predictions.items()
            },
        }
        if (sample := self.gate_inputs) is not None:
            positions = np.arange(self.tokens)[tokens]
            _, old, new = np.intersect1d(sample.tokens, positions, return_indices=True)
            order = np.argsort(new)
            rows["gate_inputs"] = GateInputs(new[order], sample.values[old[order]])
        return rows


def starts_of(lengths: NDArray[np.integer[Any]]) -> Ints:
    """Return the offsets [n + 1] of n adjacent runs of given lengths."""
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _ranges(starts: Ints, chosen: Ints) -> Ints:
    """Return the indices in each chosen range, from starts[c] up to starts[c + 1]."""
    return np.concatenate([np.arange(starts[c], starts[c + 1]) for c in chosen])


def smallest_ids(array: NDArray[Any]) -> Experts:
    """Convert expert ids to the smallest integer type. TraceError for impossible ids."""
    if array.dtype in (np.uint8, np.uint16):
        return array
    if array.dtype.kind not in "iu":
        raise TraceError(f"experts are {array.dtype}, but ids must be integers")
    if array.size and (array.min() < 0 or array.max() >= MOST_EXPERTS):
        raise TraceError(f"an expert id lies outside 0 to {MOST_EXPERTS - 1}")
    return array.astype(np.uint8 if not array.size or array.max() < 1 << 8 else np.uint16)


def check(trace: Trace) -> None:
    """Check that a trace's arrays have the promised shapes and values; TraceError, in one line."""
    experts = trace.experts
    if experts.dtype not in (np.uint8, np.uint16) or experts.ndim != 3:
        raise TraceError("experts must be [tokens, layers, top_k] in uint8 or uint16")
    if 0 in experts.shape:
        raise TraceError(f"experts are empty: {list(experts.shape)} tokens, layers and top_k")
    if trace.experts_per_layer.shape != (trace.layers,):
        raise TraceError(f"experts_per_layer must have one entry for each of {trace.layers} layers")
    if not np.all((trace.experts_per_layer >= 1) & (trace.experts_per_layer <= MOST_EXPERTS)):
        raise TraceError(f"experts_per_layer must be from 1 to {MOST_EXPERTS}")
    _check_offsets(trace)
    for name, prediction in trace.predictions.items():
        if prediction.experts.ndim != 3 or not prediction.experts.shape[2]:
            raise TraceError(f"prediction {name} must be [tokens, layers, width]")
    for name, array, shape in (
        ("weights", trace.weights, experts.shape),
        ("token_ids", trace.token_ids, experts.shape[:1]),
        *((f"prediction {n}", p.experts[..., 0], experts.shape[:2])
          for n, p in trace.predictions.items()),
    ):  # fmt: skip
        if array is not None and array.shape != shape:
            raise TraceError(f"{name} is {list(array.shape)}, but the experts need {list(shape)}")
    if (sample := trace.gate_inputs) is not None:
        tokens, values = sample.tokens, sample.values
        if values.ndim != 3 or values.shape[:2] != (len(tokens), trace.layers):
            raise TraceError(f"gate inputs are {list(values.shape)}: not [sampled, layers, hidden]")
        inside = not tokens.size or (tokens[0] >= 0 and tokens[-1] < trace.tokens)
        if not inside or np.any(np.diff(tokens) <= 0):
            raise TraceError("the tokens of gate inputs must ascend and be those of the trace")
    for start in range(0, trace.tokens, _BLOCK):
        _check_experts(trace, start)


def _check_offsets(trace: Trace) -> None:
    for what, starts in (("request", trace.request_starts), ("pass", trace.pass_starts)):
        if starts.ndim != 1 or len(starts) < 2 or starts[0] != 0 or starts[-1] != trace.tokens:
            raise TraceError(
                f"{what} offsets must begin with 0 and end with {trace.tokens}, the tokens"
            )
        if starts.min() < 0 or starts.max() > trace.tokens:
            raise TraceError(f"{what} offsets lie outside 0 to the {trace.tokens} tokens")
        lengths = np.diff(starts)
        if np.any(lengths < 0):
            at = int(np.argmax(lengths < 0))
            raise TraceError(f"{what} offsets do not ascend: {starts[at + 1]} after {starts[at]}")
        if np.any(lengths == 0):
            raise TraceError(f"{what} {int(np.argmax(lengths == 0))} is empty: it has no tokens")
    if not np.isin(trace.request_starts, trace.pass_starts).all():
        raise TraceError("a request must begin with a pass: a pass reaches over two requests")
    if len(trace.labels) != trace.requests:
        raise TraceError(f"{len(trace.labels)} labels for {trace.requests} requests")
    if trace.pass_prefill.shape != (trace.passes,):
        raise TraceError(f"{len(trace.pass_prefill)} prefill flags for {trace.passes} passes")


def _check_experts(trace: Trace, start: int) -> None:
    """Check a trace's expert ids: in range, and distinct within a token's row."""
    block = trace.experts[start : start + _BLOCK]
    most = trace.experts_per_layer
    _check_range(block, most, start, "expert")
    rows = np.sort(block, axis=2)
    if (twice := rows[..., 1:] == rows[..., :-1]).any():
        token, layer, rank = (int(i) for i in np.argwhere(twice)[0])
        raise TraceError(
            f"token {start + token} uses expert {rows[token, layer, rank]} of layer {layer} twice"
        )
    for name, prediction in trace.predictions.items():
        ids = prediction.experts[start : start + _BLOCK]
        nothing = ids == np.iinfo(ids.dtype).max
        _check_range(np.where(nothing, 0, ids), most, start, f"prediction {name}: expert")


def _check_range(block: NDArray[Any], most: Ints, start: int, what: str) -> None:
    wrong = block.max(axis=(0, 2)) >= most
    if wrong.any():
        layer = int(np.argmax(wrong))
        token, rank = (int(i) for i in np.argwhere(block[:, layer] >= most[layer])[0])
        raise TraceError(
            f"token {start + token} has {what} {block[token, layer, rank]} in layer {layer}, which"
            f" has {most[layer]} experts (0 to {most[layer] - 1})"
        )
