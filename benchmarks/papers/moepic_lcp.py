"""MoEpic, table 1 and the sensitivity of LCP to rho and omega.

Hit ratios with the same slots in every layer: 1/6 to 5/6 of its experts, as the paper's 10 to 50 of
60. Natural order; the experts of a token are pinned while it is served. LCP's priority is
mu * rho ** (nu / omega): rho and omega matter only as the half-life omega * log 2 / log(1 / rho),
the tokens in which a priority halves (64 by default). The figure sweeps it, at half of the experts.
"""

from __future__ import annotations

import argparse
from math import log

import numpy as np
from common import (
    COLOURS,
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

from greenroom.core.stream import Stream
from greenroom.policies import policy
from greenroom.sim.replay import replay
from greenroom.trace import Trace, stream

ROWS = {"RND": "random", "LFU": "lfu", "LRU": "lru", "LCP": "lcp"}
PAPER = {  # Qwen1.5-MoE on MMLU; 10, 20, 30, 40 and 50 of 60 experts
    "RND": (16.41, 33.02, 49.69, 67.41, 83.15),
    "LFU": (24.36, 43.74, 60.68, 75.84, 89.34),
    "LRU": (19.11, 38.88, 56.38, 73.16, 88.97),
    "LCP": (25.56, 45.36, 62.21, 77.12, 90.08),
}
HALF_LIVES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)


def hit_ratio(requests: Stream, trace: Trace, slots: int, name: str, seed: int) -> float:
    """Hit ratio of a policy with `slots` slots in every layer."""
    done = replay(
        requests, trace.offsets, slots * trace.layers, policy(name), scope="per-layer", seed=seed
    )
    return 1 - done.miss_ratio


def sixths(trace: Trace) -> list[int]:
    return [max(int(trace.experts_per_layer[0]) * i // 6, 1) for i in range(1, 6)]


def omega_of(tokens: float, rho: float = 0.25) -> str:
    """The policy LCP with a half-life in tokens, and the decay factor rho."""
    return f"lcp:rho={rho},omega={max(tokens * log(1 / rho) / log(2), 1):.0f}"


def main(args: argparse.Namespace) -> None:
    lives = HALF_LIVES[::3] if args.quick else HALF_LIVES
    fig, panels = figure(2, 2, 7.6, 5.2)
    rows = [
        ["Qwen1.5-MoE (paper)", name, *(f"{x:.1f} %" for x in hits)] for name, hits in PAPER.items()
    ]
    best = []
    for (model, recording), axes in zip(recordings(args).items(), panels.flat, strict=False):
        trace = recording.head(limit(args))
        requests, slots = stream(trace, "natural"), sixths(trace)
        for name, base in ROWS.items():
            hit_ratios = [hit_ratio(requests, trace, c, base, args.seed) for c in slots]
            rows.append(
                [
                    f"{MODELS[model]} ({slots[0]} to {slots[-1]} of {trace.experts_per_layer[0]})",
                    name,
                    *map(percent, hit_ratios),
                ]
            )
        half = slots[2]
        lru, lfu = (hit_ratio(requests, trace, half, name, args.seed) for name in ("lru", "lfu"))
        lcp = [hit_ratio(requests, trace, half, omega_of(x), args.seed) for x in lives]
        axes.axhline(lru, color=COLOURS["LRU"], linestyle="--", linewidth=1.2, label="LRU")
        axes.axhline(lfu, color=COLOURS["LFU"], linestyle="--", linewidth=1.2, label="LFU")
        axes.plot(lives, lcp, "o-", ms=3.5, color=COLOURS["LCP"], label="LCP")
        axes.axvline(
            64, color="#999999", linewidth=0.8, linestyle=":", label="default: rho 0.25, omega 128"
        )
        axes.set_xscale("log", base=2)
        axes.set_title(f"{MODELS[model]}, {half} of {trace.experts_per_layer[0]} a layer")
        top = int(np.argmax(lcp))
        default = hit_ratio(requests, trace, half, "lcp", args.seed)
        best.append(
            [
                MODELS[model],
                trace.tokens,
                percent(lru),
                percent(lfu),
                percent(default),
                percent(lcp[top]),
                f"{lives[top]:g} tokens (omega {2 * lives[top]:g})",
            ]
        )
    for axes in panels.flat[len(args.models) :]:
        axes.set_visible(False)
    for axes in panels[-1]:
        axes.set_xlabel("half-life of a priority (tokens)")
    for axes in panels[:, 0]:
        axes.set_ylabel("hit ratio")
    share_of_legend(fig, panels[0, 0], 4)
    save(fig, args, "moepic-lcp")
    table(
        args,
        "moepic-table1",
        ["recording", "policy", "1/6 of the experts", "2/6", "3/6", "4/6", "5/6"],
        rows,
    )
    table(
        args,
        "moepic-lcp",
        ["recording", "tokens", "LRU", "LFU", "LCP, omega 128", "LCP at its best", "at"],
        best,
    )


if __name__ == "__main__":
    parser = options(__doc__)
    parser.set_defaults(limit=12_000)
    main(parser.parse_args())
