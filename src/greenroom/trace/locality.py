"""Locality of expert routing in a trace: how often tokens reuse experts.

The measures depend on the experts of each token and layer, but not on how tokens were grouped into
forward passes. Means give each layer equal weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.errors import UsageError
from greenroom.trace import kernels
from greenroom.trace.orders import stream
from greenroom.trace.tensors import number_labels
from greenroom.trace.trace import Trace

Floats = NDArray[np.float64]
LONGEST_GAP = 4096  # tokens; longer gaps are counted together
_BLOCK = 1 << 14  # tokens that are compared at a time


def adjacent_overlap(trace: Trace) -> Floats:
    """Compute the share of a token's experts that the previous token used too, by layer.

    The result [layers] is a mean over the tokens with a previous token in their request, and 0 if
    there are no such tokens. Uniform independent routing gives top_k / experts.
    """
    follows = np.ones(trace.tokens, np.bool_)
    follows[trace.request_starts[:-1]] = False
    shared = np.zeros(trace.layers, np.int64)
    for start in range(0, trace.tokens, _BLOCK):
        tokens = start + np.flatnonzero(follows[start : start + _BLOCK])
        before, after = trace.experts[tokens - 1], trace.experts[tokens]
        for rank in range(trace.top_k):
            shared += (before[..., rank, None] == after).sum(axis=(0, 2))
    share: Floats = shared / max(int(follows.sum()) * trace.top_k, 1)
    return share


def overlap_by_label(trace: Trace) -> dict[str, float]:
    """Compute the mean overlap of consecutive tokens' experts, for each request label.

    The overlap is the share of a token's experts that the previous token used too. Returns a table
    from label to the mean over layers.
    """
    routing = replace(
        trace, weights=None, token_ids=None, gate_inputs=None, predictions={}, output_norms=None,
        token_changes=None,
    )  # fmt: skip
    labels, numbers = number_labels(trace.labels)
    return {
        label: float(adjacent_overlap(routing.select(np.flatnonzero(numbers == n))).mean())
        for n, label in enumerate(labels)
    }


def uniform_overlap(trace: Trace) -> float:
    """Compute the overlap of consecutive tokens' experts to expect from uniform routing.

    It is top_k / experts, as a mean over layers.
    """
    return float(np.mean(trace.top_k / trace.experts_per_layer))


def popularity(trace: Trace) -> list[NDArray[np.int64]]:
    """Count how many tokens used each expert: an array [experts] for each layer of a trace."""
    return np.split(trace.uses(), trace.offsets[1:-1])


def skew(trace: Trace) -> list[Floats]:
    """Compute the cumulative distribution of experts' popularity for each layer.

    Returns an array [experts] for each layer: the share of uses that the layer's 1, 2, ... most
    used experts have together.
    """
    return [np.cumsum(np.sort(counts)[::-1]) / counts.sum() for counts in popularity(trace)]


Reuse = tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]


def reuse(trace: Trace) -> Reuse:
    """Compute histograms of experts' reuse distances and reuse gaps, for each layer.

    Returns (distances, gaps), each with an array for each layer:

    distances: [experts + 1]; entry d counts the uses with d distinct other experts of the layer
               since the last use of the same expert; the last entry counts first uses. An LRU cache
               of c experts of the layer hits the uses with d < c
    gaps:      [4097]; entry g counts the uses g tokens after the last use of the same expert; the
               last entry counts longer gaps too
    """
    layer_of = np.repeat(np.arange(trace.layers), trace.experts_per_layer)
    requests = stream(trace, "natural").pieces
    depths = kernels.stack_depths(requests, layer_of, np.empty(0, requests.dtype))
    result: Reuse = [], []
    for layer, experts in enumerate(trace.experts_per_layer.tolist()):
        depth = depths.reshape(trace.experts.shape)[:, layer].ravel()
        result[0].append(np.roll(np.bincount(depth, minlength=experts + 1), -1))
        ids = trace.experts[:, layer].ravel()
        order = np.argsort(ids, kind="stable")
        again = ids[order][1:] == ids[order][:-1]
        gaps = np.minimum(np.diff(order // trace.top_k)[again], LONGEST_GAP)
        result[1].append(np.bincount(gaps, minlength=LONGEST_GAP + 1))
    return result


def median(counts: NDArray[np.int64]) -> float:
    """Compute the lower median of a histogram: the value v occurs `counts[v]` times.

    The median is nan if the histogram is empty.
    """
    total = counts.sum()
    return float(np.searchsorted(np.cumsum(counts), (total + 1) // 2)) if total else float("nan")


@dataclass(frozen=True, eq=False)
class SegmentConsistency:
    """Local routing consistency of all segments of a given number of tokens.

    A segment is a window of consecutive tokens of a request. The measures are from the paper "Not
    All Models Suit Expert Offloading": SRP as in its published code, SCH as its abstract says. (The
    code's SCH is of a running cache, which keeps the experts that the next tokens use most.)

    length:    tokens of a segment
    windows:   the number of segments
    srp:       [layers], the best F1 score between the experts that tokens use and a set of experts
               that is fixed for a segment: those used at least t times in it, for the best t
    per_layer: entry c - 1 is SCH for a cache of c experts in each layer, as a mean over layers: the
               share of uses that hit if the cache holds the most used experts of the segment
    shared:    entry c - 1 is SCH for one cache of c experts of all layers
    """

    length: int
    windows: int
    srp: Floats
    per_layer: Floats
    shared: Floats


def segment_consistency(trace: Trace, length: int) -> SegmentConsistency:
    """Compute the local routing consistency (SRP and SCH) of segments of `length` tokens.

    The measures are nan if no request has that many tokens. Raises UsageError if `length` is less
    than 1.
    """
    if length < 1:
        raise UsageError(f"the length of a segment must be at least 1 token, got {length}")
    most, uses = trace.experts_per_layer.tolist(), length * trace.top_k
    srp = np.full(trace.layers, np.nan)
    per_layer = np.zeros((trace.layers, max(most)))
    windows = 0
    for layer, experts in enumerate(most):
        ids = np.ascontiguousarray(trace.experts[:, layer])
        windows, values, ranks = _windows(ids, trace, length, experts)
        if windows:
            srp[layer] = _best_f1(values)
        hits = np.cumsum(ranks) / max(windows * uses, 1)
        per_layer[layer] = np.append(hits, np.full(max(most) - experts, hits[-1]))
    dense = (trace.experts + trace.offsets[:-1, None]).reshape(trace.tokens, -1)
    _, _, ranks = _windows(dense, trace, length, int(trace.offsets[-1]))
    shared = np.cumsum(ranks) / max(windows * uses * trace.layers, 1)
    if not windows:
        per_layer[:], shared[:] = np.nan, np.nan
    return SegmentConsistency(length, windows, srp, per_layer.mean(axis=0), shared)


def _windows(
    ids: NDArray[Any], trace: Trace, length: int, experts: int
) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
    values, ranks = np.zeros(length + 1, np.int64), np.zeros(experts, np.int64)
    return int(kernels.windows(ids, trace.request_starts, length, values, ranks)), values, ranks


def _best_f1(values: NDArray[np.int64]) -> float:
    """Compute the best F1 score over thresholds t: 2 hits / (predicted + used).

    `values[v]` is the number of (window, expert) pairs with v uses. The experts with at least t
    uses in a window are predicted for all its tokens.
    """
    length = len(values) - 1
    hits = np.cumsum((values * np.arange(length + 1))[:0:-1])[::-1]  # for thresholds 1 ... length
    predicted = np.cumsum(values[:0:-1])[::-1] * length
    return float(np.max(2 * hits / (predicted + hits[0])))


def summary(trace: Trace, lengths: Sequence[int], multiples: Sequence[int]) -> dict[str, Any]:
    """Return what `greenroom trace info` shows about locality, in JSON types.

    Shares are from 0 to 1. Segments have `lengths` tokens. Hit shares (LRU and SCH) are given for
    caches of `multiples` times top_k experts in each layer.
    """
    curves, (uses, gaps) = skew(trace), reuse(trace)
    distances = [counts[:-1] for counts in uses]
    hits = [np.cumsum(counts) / trace.tokens / trace.top_k for counts in distances]
    sizes = [m * trace.top_k for m in multiples if m * trace.top_k <= trace.experts_per_layer.min()]
    overlap = adjacent_overlap(trace)
    return {
        "overlap": float(overlap.mean()),
        "overlap_uniform": uniform_overlap(trace),
        "overlap_by_layer": _rounded(overlap),
        "overlap_by_label": overlap_by_label(trace),
        "popularity_cdf": {
            f"{share}%": float(np.mean([c[max(len(c) * share // 100, 1) - 1] for c in curves]))
            for share in (5, 10, 25, 50, 75)
        },
        "popularity_cdf_by_layer": [_rounded(curve) for curve in curves],
        "unused_experts": sum(int((counts == 0).sum()) for counts in popularity(trace)),
        "first_uses": sum(int(counts[-1]) for counts in uses),
        "reuse_distance_by_layer": [_number(median(counts)) for counts in distances],
        "reuse_gap_by_layer": [_number(median(counts)) for counts in gaps],
        "lru_hits_per_layer": {
            str(c): float(np.mean([curve[c - 1] for curve in hits])) for c in sizes
        },
        "segments": [
            {
                "length": length,
                "windows": part.windows,
                "srp": _number(float(part.srp.mean())),
                "sch": {str(c): _number(float(part.per_layer[c - 1])) for c in sizes},
                "sch_shared": {
                    str(c * trace.layers): _number(float(part.shared[c * trace.layers - 1]))
                    for c in sizes
                },
            }
            for length in lengths
            for part in [segment_consistency(trace, length)]
        ],
    }


def _number(x: float) -> float | None:
    """Round a number to 6 decimals for JSON; None for nan, which JSON does not have."""
    return None if np.isnan(x) else round(x, 6)


def _rounded(values: Floats) -> list[float]:
    return [round(float(x), 6) for x in values]
