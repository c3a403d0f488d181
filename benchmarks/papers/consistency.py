"""Not All Models Suit Expert Offloading: the abstract's claims on SRP and SCH.

SRP and SCH are those of `greenroom trace info` (greenroom.trace.locality), for segments of 4, 16
and 64 tokens.

consistency.md: SRP, and SRP of the same tokens in random order, which keeps popularity and loses
locality. The claim: models with MoE on every layer and without shared experts have the highest.

consistency-sizes.md: SCH for caches of 1 to 4 times the experts that a token uses, and the best
size: where SCH less the share of the layer's experts in the cache is largest. The claim: about
twice.

consistency-running.md: SCH as the published code has it, of a cache that runs over each request and
knows the next tokens of a segment's length (lookahead.py); mean over layers.

consistency-experts.md, for recordings with token ids and several labels: by expert, how much more
often than on average other tokens use it (locality) of the same segment of 16, (domain) of the same
label, and (vocabulary) with the same token id. Domain and vocabulary are learned on requests
0, 2, 4, ...; all are measured on the uses in requests 1, 3, 5, ... The table has Spearman's rank
correlation of locality with the two, over a layer's experts, as a mean over layers. The claim: it
is higher for the domain.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
from common import MODELS, limit, options, percent, recordings, table
from lookahead import lookahead_hits

from greenroom.trace import Trace
from greenroom.trace.locality import segment_consistency

LENGTHS, MULTIPLES, SEGMENT = (4, 16, 64), (1, 2, 3, 4), 16
# MoE on every layer, shared experts: of the models' configurations.
SHAPES = {
    "olmoe-1b-7b": ("yes", 0),
    "gpt-oss-20b": ("yes", 0),
    "deepseek-v2-lite": ("all but the first", 2),
    "mixtral-8x7b": ("yes", 0),
}


def shuffled(trace: Trace, seed: int) -> Trace:
    """The same tokens in random order, in requests and passes of the same lengths."""
    order = np.random.default_rng(seed).permutation(trace.tokens)
    return replace(
        trace, experts=trace.experts[order], weights=None, token_ids=None, gate_inputs=None,
        predictions={},
    )  # fmt: skip


def rows_of(model: str, trace: Trace, seed: int) -> tuple[list[object], list[list[object]]]:
    """The recording's row of SRP, and its rows of SCH."""
    name, (every, shared) = MODELS[model], SHAPES[model]
    experts, mixed = int(trace.experts_per_layer[0]), shuffled(trace, seed)
    row: list[object] = [name, every, shared, trace.top_k, experts]
    sizes: list[list[object]] = []
    for length in LENGTHS:
        part = segment_consistency(trace, length)
        row += [float(part.srp.mean()), float(segment_consistency(mixed, length).srp.mean())]
        hits = part.per_layer[[min(m * trace.top_k, experts) - 1 for m in MULTIPLES]]
        best = int(np.argmax(part.per_layer - np.arange(1, experts + 1) / experts)) + 1
        sizes.append([name, length, *map(percent, hits), f"{best / trace.top_k:.2f}"])
    return row, sizes


def running_rows(model: str, trace: Trace) -> list[list[object]]:
    """The recording's rows of SCH as the published code has it."""
    rows: list[list[object]] = []
    for length in LENGTHS:
        shares = []
        for multiple in MULTIPLES:
            hits = 0
            for layer, experts in enumerate(trace.experts_per_layer.tolist()):
                ids = np.ascontiguousarray(trace.experts[:, layer])
                capacity = min(multiple * trace.top_k, experts)
                hits += lookahead_hits(ids, trace.request_starts, length, capacity, experts)
            shares.append(percent(hits / trace.experts.size))
        rows.append([MODELS[model], length, *shares])
    return rows


def expert_rows(trace: Trace) -> tuple[float, float]:
    """Rank correlations of locality with specialisation: by domain, and by vocabulary."""
    assert trace.token_ids is not None
    numbers = np.repeat(np.arange(trace.requests), np.diff(trace.request_starts))
    learned = numbers % 2 == 0
    names = {label: n for n, label in enumerate(sorted({*trace.labels}))}
    domains = np.array([names[label] for label in trace.labels])[numbers]
    ids = np.unique(trace.token_ids, return_inverse=True)[1]
    found = []
    for layer, experts in enumerate(trace.experts_per_layer.tolist()):
        used = np.zeros((trace.tokens, experts))
        np.put_along_axis(used, trace.experts[:, layer].astype(np.int64), 1.0, axis=1)
        local = locality(used, trace.request_starts)
        kinds = (domains, ids)
        found.append([rank_correlation(local, lift(used, each, learned)) for each in kinds])
    domain, vocabulary = np.mean(found, axis=0).tolist()
    return domain, vocabulary


def lift(used: np.ndarray, kinds: np.ndarray, learned: np.ndarray) -> np.ndarray:
    """[experts] chance that a learned token of the same kind uses what a later token uses.

    Less the chance that any learned token uses it. Later tokens of unknown kinds are left out.
    """
    tokens = np.bincount(kinds[learned], minlength=kinds.max() + 1)
    uses = np.zeros((tokens.size, used.shape[1]))
    np.add.at(uses, kinds[learned], used[learned])
    later = ~learned & (tokens[kinds] > 0)
    chance = uses[kinds[later]] / tokens[kinds[later], None]
    counts = np.maximum(used[later].sum(0), 1)
    return np.asarray((used[later] * chance).sum(0) / counts - used[learned].mean(0))


def locality(used: np.ndarray, request_starts: np.ndarray) -> np.ndarray:
    """[experts] chance that another token of a segment uses what one of its tokens uses.

    Segments are disjoint, of requests 1, 3, 5, ... Less the chance of any token of these.
    """
    pairs, uses, tokens = np.zeros(used.shape[1]), np.zeros(used.shape[1]), 0
    for start, end in zip(request_starts[1:-1:2], request_starts[2::2], strict=False):
        for first in range(start, end - SEGMENT + 1, SEGMENT):
            counts = used[first : first + SEGMENT].sum(0)
            pairs += counts * (counts - 1)
            uses += counts
            tokens += SEGMENT
    chance = pairs / np.maximum(uses * (SEGMENT - 1), 1)
    return np.asarray(chance - uses / max(tokens, 1))


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation; ties are rare and keep their order."""
    ranks = [np.argsort(np.argsort(x, kind="stable"), kind="stable") for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def main(args: argparse.Namespace) -> None:
    rows, sizes, running, experts = [], [], [], []
    for model, recording in recordings(args).items():
        trace = recording.head(limit(args))
        row, of_sizes = rows_of(model, trace, args.seed)
        rows.append(row)
        sizes += of_sizes
        running += running_rows(model, trace)
        if recording.token_ids is not None and len({*recording.labels}) > 1:
            if args.quick:
                recording = recording.select(np.arange(0, recording.requests, 10))
            experts.append([MODELS[model], *(f"{c:.2f}" for c in expert_rows(recording))])
    header = ["recording", "MoE on every layer", "shared experts", "top-k", "experts"]
    header += [text for n in LENGTHS for text in (f"SRP, {n} tokens", f"{n}, random order")]
    table(args, "consistency", header, rows)
    header = ["recording", "segment", *(f"SCH, {m} x top-k" for m in MULTIPLES), "best / top-k"]
    table(args, "consistency-sizes", header, sizes)
    table(args, "consistency-running", header[:-1], running)
    if experts:
        header = ["recording", "locality and domain", "locality and vocabulary"]
        table(args, "consistency-experts", header, experts)


if __name__ == "__main__":
    main(options(__doc__).parse_args())
