"""Traces of expert routing: the experts that each token used, by forward pass and request."""

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
# Optional arrays with a row for each token, by their fields of `Trace`.
OPTIONAL: dict[str, Any] = {
    "weights": np.float16,
    "token_ids": np.int32,
    "output_norms": np.float32,
    "token_changes": np.float32,
}
_BLOCK = 1 << 16  # tokens checked at a time, which bounds the memory of a check


@dataclass(frozen=True, eq=False)
class GateInputs:
    """Recorded inputs of the gates (hidden states), for a sample of a trace's tokens.

    tokens: the sampled tokens, ascending
    values: the hidden states, [sampled tokens, layers, hidden size]
    """

    tokens: Ints
    values: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Prediction:
    """Recorded predictions of the experts that each token would use.

    experts:  ids within their layer, likeliest first, [tokens, layers, predicted experts]; the
              largest id of the type (255 or 65535) means that there was no prediction
    distance: how many layers ahead the predictions were made
    """

    experts: Experts
    distance: int


@dataclass(frozen=True, eq=False)
class Trace:
    """Trace of expert routing: the experts that each token used, by pass and by request.

    experts:           ids within their layer, in the gate's rank order if it gives one, [tokens,
                       layers, top_k]
    experts_per_layer: how many experts each layer has
    request_starts:    the first token of each request, then the number of tokens
    pass_starts:       the same for forward passes; a pass has tokens of one request only
    pass_prefill:      whether each pass is a prefill
    labels:            the label of each request
    weights:           gate weights, like `experts`
    token_ids:         the vocabulary id of each token
    gate_inputs:       hidden states of a sample of the tokens
    predictions:       recorded predictions, by predictor
    meta:              information about the model and the run
    output_norms:      L2 norms of the experts' outputs, before gate weights, like `experts`
    token_changes:     1 - cosine similarity of the token's hidden state before the layer's routed
                       experts and after their sum is added, [tokens, layers]
    new_tokens:        how many tokens each pass gave its text, where passes verify drafts
                       (`speculate`); files do not have it

    Arrays may be read-only views of a mapped file. The constructor raises TraceError if the arrays
    do not fit together.
    """

    experts: Experts
    experts_per_layer: Ints
    request_starts: Ints
    pass_starts: Ints
    pass_prefill: NDArray[np.bool_]
    labels: tuple[str, ...]
    weights: NDArray[np.float16] | None = None
    token_ids: NDArray[np.int32] | None = None
    gate_inputs: GateInputs | None = None
    predictions: dict[str, Prediction] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    output_norms: NDArray[np.float32] | None = None
    token_changes: NDArray[np.float32] | None = None
    new_tokens: Ints | None = None

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
        """First dense id of each layer, then the number of experts in all layers.

        The dense id of an expert is `offsets[layer] + expert`; it is unique in the model.
        """
        return starts_of(self.experts_per_layer)

    @cached_property
    def first_passes(self) -> Ints:
        """First forward pass of each of a trace's requests, then the number of passes."""
        return np.searchsorted(self.pass_starts, self.request_starts)

    @cached_property
    def pass_requests(self) -> Ints:
        """Number of the request to which each forward pass of a trace belongs."""
        return np.repeat(np.arange(self.requests), np.diff(self.first_passes))

    def uses(self, begin: int = 0, end: int | None = None) -> Ints:
        """Count how many of a trace's tokens `begin` to `end - 1` used each expert.

        Returns an array [experts of all layers], indexed by dense id.
        """
        part = self.experts[begin:end]
        return np.concatenate([
            np.bincount(part[:, layer].ravel(), minlength=int(experts))
            for layer, experts in enumerate(self.experts_per_layer)
        ])  # fmt: skip

    def select(self, requests: Sequence[int] | NDArray[np.integer[Any]]) -> Trace:
        """Build a trace of selected requests, given by their numbers, in the given order.

        Raises TraceError if no request is selected, or a number is out of range.
        """
        chosen = np.asarray(requests, np.int64).reshape(-1)
        if chosen.size == 0:
            raise TraceError("no request is selected, but a trace needs at least one request")
        if chosen.min() < 0 or chosen.max() >= self.requests:
            wrong = chosen[(chosen < 0) | (chosen >= self.requests)][0]
            raise TraceError(
                f"there is no request {wrong}: the trace has the requests 0 to {self.requests - 1}"
            )
        tokens = _ranges(self.request_starts, chosen)
        passes = _ranges(self.first_passes, chosen)
        return replace(
            self,
            **self._rows(tokens),
            request_starts=starts_of(np.diff(self.request_starts)[chosen]),
            pass_starts=starts_of(np.diff(self.pass_starts)[passes]),
            pass_prefill=self.pass_prefill[passes],
            labels=tuple(self.labels[r] for r in chosen.tolist()),
            new_tokens=None if self.new_tokens is None else self.new_tokens[passes],
        )

    def head(self, tokens: int) -> Trace:
        """Build a trace of the first tokens; the last request and pass may be cut short.

        Raises TraceError if `tokens` is less than 1.
        """
        if tokens < 1:
            raise TraceError(f"a trace must have at least 1 token, but {tokens} were requested")
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
            new_tokens=None if self.new_tokens is None else self.new_tokens[:passes],
        )

    def _rows(self, tokens: slice | Ints) -> dict[str, Any]:
        """Select tokens from those of a trace's arrays that have a row for each token."""
        arrays = {name: getattr(self, name) for name in ("experts", *OPTIONAL)}
        rows: dict[str, Any] = {
            **{name: None if each is None else each[tokens] for name, each in arrays.items()},
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
    """Return where consecutive ranges of given lengths begin, then where the last one ends."""
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _ranges(starts: Ints, chosen: Ints) -> Ints:
    """Return the indices of the chosen ranges; range c is `starts[c]` up to `starts[c + 1]`."""
    return np.concatenate([np.arange(starts[c], starts[c + 1]) for c in chosen])


def smallest_ids(array: NDArray[Any]) -> Experts:
    """Convert expert ids to uint8 or, if an id exceeds 255, to uint16.

    Arrays that have one of these types are returned unchanged. Raises TraceError if the ids are not
    integers from 0 to 65535.
    """
    if array.dtype in (np.uint8, np.uint16):
        return array
    if array.dtype.kind not in "iu":
        raise TraceError(f"expert ids must be integers, but have the dtype {array.dtype}")
    if array.size and (array.min() < 0 or array.max() >= MOST_EXPERTS):
        wrong = array.min() if array.min() < 0 else array.max()
        raise TraceError(f"the expert id {wrong} is not from 0 to {MOST_EXPERTS - 1}")
    return array.astype(np.uint8 if not array.size or array.max() < 1 << 8 else np.uint16)


def check(trace: Trace) -> None:
    """Raise TraceError if the shapes and values of a trace's arrays do not fit together."""
    experts, most = trace.experts, trace.experts_per_layer
    if experts.dtype not in (np.uint8, np.uint16) or experts.ndim != 3:
        raise TraceError(
            f"the array experts has the dtype {experts.dtype} and shape {list(experts.shape)}, but"
            " must be uint8 or uint16 [tokens, layers, top_k]"
        )
    if 0 in experts.shape:
        raise TraceError(
            f"the array experts is empty: its shape [tokens, layers, top_k] is"
            f" {list(experts.shape)}"
        )
    if most.shape != (trace.layers,):
        raise TraceError(
            f"experts_per_layer has shape {list(most.shape)}, but must have one entry for each of"
            f" the {trace.layers} layers"
        )
    if not np.all((most >= 1) & (most <= MOST_EXPERTS)):
        wrong = most[(most < 1) | (most > MOST_EXPERTS)][0]
        raise TraceError(f"experts_per_layer has {wrong}, but must be from 1 to {MOST_EXPERTS}")
    _check_offsets(trace)
    for name, prediction in trace.predictions.items():
        if prediction.experts.ndim != 3 or not prediction.experts.shape[2]:
            raise TraceError(
                f"prediction {name} has shape {list(prediction.experts.shape)}, but must have"
                " [tokens, layers, predicted experts]"
            )
    for name, array, shape in (
        ("weights", trace.weights, experts.shape),
        ("token_ids", trace.token_ids, experts.shape[:1]),
        ("output_norms", trace.output_norms, experts.shape),
        ("token_changes", trace.token_changes, experts.shape[:2]),
        *((f"prediction {n}", p.experts[..., 0], experts.shape[:2])
          for n, p in trace.predictions.items()),
    ):  # fmt: skip
        if array is not None and array.shape != shape:
            raise TraceError(
                f"{name} has shape {list(array.shape)}, but must have shape {list(shape)} to fit"
                f" the experts of the trace"
            )
    if trace.gate_inputs is not None:
        _check_gate_inputs(trace, trace.gate_inputs)
    for start in range(0, trace.tokens, _BLOCK):
        _check_experts(trace, start)


def _check_gate_inputs(trace: Trace, sample: GateInputs) -> None:
    tokens, values = sample.tokens, sample.values
    if values.ndim != 3 or values.shape[:2] != (len(tokens), trace.layers):
        raise TraceError(
            f"gate_inputs.values has shape {list(values.shape)}, but must have"
            f" [{len(tokens)} sampled tokens, {trace.layers} layers, hidden size]"
        )
    inside = not tokens.size or (tokens[0] >= 0 and tokens[-1] < trace.tokens)
    if not inside or np.any(np.diff(tokens) <= 0):
        raise TraceError(
            f"gate_inputs.tokens must ascend and be from 0 to {trace.tokens - 1}, the last token"
        )


def _check_offsets(trace: Trace) -> None:
    for what, starts in (("request", trace.request_starts), ("pass", trace.pass_starts)):
        if starts.ndim != 1 or len(starts) < 2 or starts[0] != 0 or starts[-1] != trace.tokens:
            raise TraceError(
                f"{what}_starts, the first token of each {what}, must begin with 0 and end with"
                f" {trace.tokens}, the number of tokens"
            )
        outside = starts[(starts < 0) | (starts > trace.tokens)]
        if outside.size:
            raise TraceError(
                f"{what}_starts has {outside[0]}, but must be from 0 to {trace.tokens}, the number"
                " of tokens"
            )
        lengths = np.diff(starts)
        if np.any(lengths < 0):
            at = int(np.argmax(lengths < 0))
            raise TraceError(
                f"{what}_starts, the first token of each {what}, must ascend, but has"
                f" {starts[at + 1]} after {starts[at]}"
            )
        if np.any(lengths == 0):
            raise TraceError(
                f"{what} {int(np.argmax(lengths == 0))} has no tokens, but each {what} needs at"
                " least one"
            )
    crossing = trace.request_starts[~np.isin(trace.request_starts, trace.pass_starts)]
    if crossing.size:
        raise TraceError(
            f"a pass must have tokens of one request only, but a request begins at token"
            f" {crossing[0]}, inside a pass"
        )
    if len(trace.labels) != trace.requests:
        raise TraceError(
            f"the trace has {len(trace.labels)} labels, but must have one for each of the"
            f" {trace.requests} requests"
        )
    if trace.pass_prefill.shape != (trace.passes,):
        raise TraceError(
            f"pass_prefill has shape {list(trace.pass_prefill.shape)}, but must have one flag for"
            f" each of the {trace.passes} passes"
        )


def _check_experts(trace: Trace, start: int) -> None:
    """Raise TraceError if expert ids are out of range, or a token has one twice in a layer.

    Checks a block of tokens from token `start` on.
    """
    block = trace.experts[start : start + _BLOCK]
    most = trace.experts_per_layer
    _check_range(block, most, start, "expert")
    rows = np.sort(block, axis=2)
    if (twice := rows[..., 1:] == rows[..., :-1]).any():
        token, layer, rank = (int(i) for i in np.argwhere(twice)[0])
        raise TraceError(
            f"token {start + token} has the expert {rows[token, layer, rank]} of layer {layer}"
            " twice, but a token's experts must be distinct"
        )
    for name, prediction in trace.predictions.items():
        ids = prediction.experts[start : start + _BLOCK]
        nothing = ids == np.iinfo(ids.dtype).max
        _check_range(np.where(nothing, 0, ids), most, start, f"prediction {name}: expert")
    for name in ("output_norms", "token_changes"):
        if (values := getattr(trace, name)) is None:
            continue
        values = values[start : start + _BLOCK]
        if (wrong := ~(np.isfinite(values) & (values >= 0))).any():
            at = tuple(np.argwhere(wrong)[0])
            raise TraceError(
                f"token {start + at[0]} has {values[at]:g} in {name} of layer {at[1]}, but the"
                " array must have finite numbers from 0"
            )


def _check_range(block: NDArray[Any], most: Ints, start: int, what: str) -> None:
    wrong = block.max(axis=(0, 2)) >= most
    if wrong.any():
        layer = int(np.argmax(wrong))
        token, rank = (int(i) for i in np.argwhere(block[:, layer] >= most[layer])[0])
        raise TraceError(
            f"token {start + token} has {what} {block[token, layer, rank]} in layer {layer}, which"
            f" has {most[layer]} experts (0 to {most[layer] - 1})"
        )
