"""ProMoE, figure 5: skew of the experts' popularity, and the hit ratio of LRU.

(a) the share of all uses that goes to the most used experts of a layer, a mean over layers: of the
whole recording (solid), and of single requests (dotted, a mean over them). (b) the hit ratio of LRU
over the share of the experts that are cached, as many slots in every layer, natural order, nothing
pinned. Switch and NLLB, the paper's skewed models, are not among the recordings: a Zipf trace
(a = 1, 128 experts, top-1) replaces them.
"""

from __future__ import annotations

import argparse

import numpy as np
from common import (
    BY_MODEL,
    MODELS,
    figure,
    limit,
    options,
    percent,
    recordings,
    save,
    share_of_legend,
    table,
)

from greenroom.config import ZipfConfig
from greenroom.sim.curves import lru_curve
from greenroom.trace import Trace, stream
from greenroom.trace.groups import activation_matrices
from greenroom.trace.locality import skew
from greenroom.trace.synth import zipf

SHARES = (0.1, 0.25, 0.5, 0.75)


def overall(trace: Trace) -> np.ndarray:
    """[experts of a layer] the CDF, a mean over layers."""
    return np.mean(skew(trace), axis=0)


def within(trace: Trace) -> np.ndarray:
    """[experts of a layer] the CDF within a request, a mean over layers and requests."""
    counts = activation_matrices(trace).reshape(trace.requests, trace.layers, -1)
    ranked = np.cumsum(-np.sort(-counts, axis=2), axis=2)
    return (ranked / ranked[..., -1:]).mean(axis=(0, 1))


def hits(trace: Trace, shares: tuple[float, ...] | np.ndarray) -> np.ndarray:
    """LRU's hit ratio if every layer has slots for a share of its experts."""
    curve = lru_curve(stream(trace, "natural"), trace.offsets, scope="per-layer")
    slots = (np.asarray(shares) * trace.experts_per_layer[0]).astype(int).clip(1) * trace.layers
    return 1 - curve.misses[slots - trace.layers] / curve.requests


def main(args: argparse.Namespace) -> None:
    fig, panels = figure(1, 2, 7.6, 3.6)
    left, right = panels[0]
    traces = {model: trace.head(limit(args)) for model, trace in recordings(args).items()}
    synthetic = zipf(ZipfConfig(layers=12, experts=128, tokens=limit(args) // 4, seed=args.seed))
    rows, grid = [], np.linspace(0.02, 1, 50)
    for model, trace in {**traces, "zipf": synthetic}.items():
        name = MODELS.get(model, "Zipf, a = 1 (synthetic)")
        colour = BY_MODEL.get(model, "#888888")
        cdf, experts = overall(trace), int(trace.experts_per_layer[0])
        at = np.arange(experts + 1) / experts
        dash = "-" if model in MODELS else (0, (5, 2))
        left.plot(at, np.append(0, cdf), color=colour, linestyle=dash, label=name)
        hit_shares = hits(trace, SHARES)
        right.plot(grid, hits(trace, grid), color=colour, linestyle=dash)
        if model in MODELS:
            left.plot(at, np.append(0, within(trace)), color=colour, linestyle=":")
        top = [int(share * experts) for share in (0.1, 0.25, 0.5)]
        rows.append([
            name, trace.tokens, *(percent(cdf[i - 1]) if i else "-" for i in top),
            percent(within(trace)[top[1] - 1]) if model in MODELS else "-",
            *(percent(h) for h in hit_shares),
        ])  # fmt: skip
    left.plot([0, 1], [0, 1], color="#bbbbbb", linewidth=0.8, zorder=0)
    right.plot([0, 1], [0, 1], color="#bbbbbb", linewidth=0.8, zorder=0)
    left.set_title("(a) popularity")
    left.set(xlabel="share of a layer's experts, most used first", ylabel="share of uses")
    right.set_title("(b) LRU, the same slots in every layer")
    right.set(xlabel="share of experts cached", ylabel="hit ratio")
    for axes in (left, right):
        axes.set(xlim=(0, 1), ylim=(0, 1))
    share_of_legend(fig, left, 3)
    save(fig, args, "promoe-skew")
    table(
        args, "promoe-skew",
        ["recording", "tokens", "uses by the top 10 %", "25 %", "50 %", "25 % within a request",
         *(f"LRU hits, {share:.0%} cached" for share in SHARES)],
        rows,
    )  # fmt: skip


if __name__ == "__main__":
    main(options(__doc__).parse_args())
