"""MoE-Infinity, figure 2 and section 4.1: how requests reuse experts.

The figure has the uses of each expert of the last layer, relative to the most used one: in the
longest request of each half of the recording, and in all requests together.
The first table has the share of a layer's uses that goes to the most used quarter of its experts,
a mean over layers and over requests, and the same of all requests together. An even use would give
25 %. A short request is uneven by chance, so that `by chance` has requests of the same lengths
whose tokens choose experts as all requests together do. The last rows are routers of the
benchmarks' checkpoints (checkpoints.py): 64 experts, top-8, logits -s * log(rank) + N(0, 1).

The second table has the share of all experts that a request uses in its first 32 tokens (the paper
decodes 32): at all, at least twice (`repeatedly`), in a tenth, a quarter and half of the tokens.
"""

from __future__ import annotations

import argparse

import numpy as np
from common import BY_MODEL, MODELS, figure, heads, limit, options, percent, recordings, save, table

from greenroom.trace import Trace
from greenroom.trace.groups import activation_matrices

TOKENS = 32
PARTS = (0.1, 0.25, 0.5)
ZIPF = (0.7, 1.0, 1.5)  # the skews s of the benchmarks' checkpoints


def quarter(counts: np.ndarray) -> float:
    """Share of uses [..., experts] that goes to the most used quarter of the experts."""
    ranked = -np.sort(-counts, axis=-1)
    most = ranked[..., : counts.shape[-1] // 4].sum(axis=-1)
    return float((most / ranked.sum(axis=-1)).mean())


def by_chance(counts: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Counts [requests, layers, experts] of requests that all choose experts alike."""
    merged = counts.sum(axis=0)
    shares = merged / merged.sum(axis=-1, keepdims=True)
    uses = counts.sum(axis=-1)
    return np.stack([
        np.stack([random.multinomial(n, share) for n, share in zip(row, shares, strict=True)])
        for row in uses
    ])  # fmt: skip


def zipf_uses(skew: float, random: np.random.Generator) -> np.ndarray:
    """Uses of each expert by 20,000 tokens of a skewed router of the benchmarks' checkpoints."""
    logits = random.standard_normal((20_000, 64)) - skew * np.log(np.arange(1, 65))
    return np.bincount(np.argpartition(logits, -8)[:, -8:].ravel(), minlength=64)


def used_shares(trace: Trace) -> list[str]:
    """Share of all experts that a request uses in its first tokens: at all, twice, often."""
    long_enough = np.flatnonzero(np.diff(trace.request_starts) >= TOKENS)
    counts = activation_matrices(heads(trace, TOKENS, long_enough))
    least = (1, 2, *(int(np.ceil(part * TOKENS)) for part in PARTS))
    return [str(len(long_enough)), *(percent(float((counts >= n).mean())) for n in least)]


def main(args: argparse.Namespace) -> None:
    random = np.random.default_rng(args.seed)
    fig, panels = figure(len(args.models), 3, 7.6, 0.5 + 1.35 * len(args.models), sharey=True)
    skews, shares = [], []
    for row, (model, recording) in enumerate(recordings(args).items()):
        trace = recording.head(limit(args))
        counts = activation_matrices(trace).reshape(trace.requests, trace.layers, -1)
        merged = counts.sum(axis=0)
        lengths, half = np.diff(trace.request_starts), trace.requests // 2
        longest = counts[lengths[:half].argmax()], counts[half + lengths[half:].argmax()]
        samples = (*longest, merged)
        titles = ("one request", "another", f"{trace.requests} requests")
        for axes, sample, title in zip(panels[row], samples, titles, strict=True):
            last = sample[-1] / sample[-1].max()
            axes.bar(np.arange(last.size), last, color=BY_MODEL[model])
            axes.set_title(f"{MODELS[model].split(' ')[0]}: {title}", fontsize=7.5)
            axes.grid(visible=False)
        skews.append([
            MODELS[model], trace.requests, percent(quarter(counts)),
            percent(quarter(by_chance(counts, random))), percent(quarter(merged)),
        ])  # fmt: skip
        shares.append([MODELS[model], *used_shares(trace)])
    for skew in ZIPF:
        uses = percent(quarter(zipf_uses(skew, random)))
        skews.append([f"checkpoint zipf{skew:.1f}", "-", "-", "-", uses])
    for axes in panels[-1]:
        axes.set_xlabel("expert of the last layer")
    save(fig, args, "expert-reuse")
    header = ["recording", "requests", "within a request", "by chance", "all requests together"]
    table(args, "expert-reuse", header, skews)
    table(
        args, "expert-reuse-share",
        ["recording", "requests", "at all", "repeatedly",
         *(f"in {part:.0%} of the tokens" for part in PARTS)],
        shares,
    )  # fmt: skip


if __name__ == "__main__":
    main(options(__doc__).parse_args())
