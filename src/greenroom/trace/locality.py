"""Locality of routing in a trace: measures of reuse that bound an expert cache.

All measures are of layers and tokens; passes play no part. Means give each layer equal weight.
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
    """Compute the share of a token's experts that the previous token used too, [layers].

    It is taken over the tokens with a previous token in their request; 0 where there are none.
    Uniform independent routing gives top_k / experts.
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
    """Compute the mean overlap of consecutive tokens' experts, for the requests of each label."""
    routing = replace(trace, weights=None, token_ids=None, gate_inputs=None, predictions={})
    labels, numbers = number_labels(trace.labels)
    return {
        label: float(adjacent_overlap(routing.select(np.flatnonzero(numbers == n))).mean())
        for n, label in enumerate(labels)
    }


def uniform_overlap(trace: Trace) -> float:
    """Compute the expected overlap of consecutive tokens' experts under uniform routing.

    The result is a mean over layers.
    """
    return float(np.mean(trace.top_k / trace.experts_per_layer))


def popularity(trace: Trace) -> list[NDArray[np.int64]]:
    """Count the uses of each expert: [experts] for each layer of a trace."""
    return np.split(trace.uses(), trace.offsets[1:-1])


def skew(trace: Trace) -> list[Floats]:
    """Compute the cumulative distribution of experts' popularity for each layer.

    Returns for each layer [experts]: the share of uses of its most used 1, 2, ... experts.
    """
    return [np.cumsum(np.sort(counts)[::-1]) / counts.sum() for counts in popularity(trace)]


Reuse = tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]


def reuse(trace: Trace) -> Reuse:
    """Compute histograms of experts' reuse distances and reuse gaps, for each layer.

    Returns (distances, gaps), over the whole trace, with a token's experts in stored order.
    distances [experts + 1]: uses by the number of distinct other experts of the layer since the
    last use of the same expert; the last entry counts first uses. An LRU cache of c slots a layer
    hits the uses below c. gaps [LONGEST_GAP + 1]: uses by tokens since the last use.
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
    """Compute the lower median of a histogram of integers; nan of an empty one.

    The values 0, 1, ... occur `counts` times.
    """
    total = counts.sum()
    return float(np.searchsorted(np.cumsum(counts), (total + 1) // 2)) if total else float("nan")


@dataclass(frozen=True, eq=False)
class SegmentConsistency:
    """Local routing consistency over all windows of a given number of tokens.

    The measures are those of "Not All Models Suit Expert Offloading": our reading of its abstract,
    checked against its published code.
    srp [layers]: the best F1 between the experts that tokens use and a group of experts that is
    fixed for their segment. The best group has the experts used at least t times in the segment,
    for the best t.
    per_layer[c - 1], shared[c - 1]: SCH, the share of uses that hit a cache of the c most used
    experts of each segment: c slots a layer (mean over layers), or c slots for all layers.
    """

    length: int
    windows: int
    srp: Floats
    per_layer: Floats
    shared: Floats


def segment_consistency(trace: Trace, length: int) -> SegmentConsistency:
    """Compute local routing consistency (SRP and SCH) of segments of a given length.

    nan where no request is that long.
    """
    if length < 1:
        raise UsageError(f"a segment needs at least one token, got {length}")
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
    """Compute the best F1 score over thresholds: 2 hits / (predicted + used).

    `values[v]` counts (window, expert) pairs with v uses.
    """
    length = len(values) - 1
    hits = np.cumsum((values * np.arange(length + 1))[:0:-1])[::-1]  # for thresholds 1 ... length
    predicted = np.cumsum(values[:0:-1])[::-1] * length
    return float(np.max(2 * hits / (predicted + hits[0])))


def summary(trace: Trace, lengths: Sequence[int], multiples: Sequence[int]) -> dict[str, Any]:
    """Return the figures of `trace info` about locality, in JSON types.

    Shares are in [0, 1]. SCH is given for caches of `multiples` times top_k experts a layer.
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
    """Round a number for JSON; None for nan, which JSON does not have."""
    return None if np.isnan(x) else round(x, 6)


def _rounded(values: Floats) -> list[float]:
    return [round(float(x), 6) for x in values]
