"""LLRU paper, figure 5: misses over OPT's, spread over ten requests of each recording.

Requests in rounds (section 5.1), each from an empty cache, nothing pinned. The paper has k = 200 of
Llama-MoE's 512 experts (39 %) and of Mixtral's 256 (78 %): here both shares for every recording.
LLRU-Dist is LRU-Dist: within a layer, LLRU's order is LRU's. The second table replays whole
recordings (up to --limit tokens), one cache for all their requests.
"""

from __future__ import annotations

import argparse

import numpy as np
from common import (
    COLOURS,
    MODELS,
    experts_of,
    figure,
    limit,
    options,
    percent,
    recordings,
    save,
    table,
)

from greenroom.core.stream import Stream
from greenroom.policies import policy
from greenroom.sim.curves import opt_curve
from greenroom.sim.replay import replay
from greenroom.trace import Trace, stream

SHARES = {"39 %": 200 / 512, "78 %": 200 / 256}
ONLINE = {
    "Marking": ("marking", "shared"),
    "LRU": ("lru", "shared"),
    "LRU-Dist": ("lru", "per-layer"),
    "LLRU": ("llru", "shared"),
}
LEAST = 64  # tokens of a request that takes part


def some(trace: Trace, number: int, seed: int) -> list[Trace]:
    """Random requests of sufficient length, each as a trace of its own."""
    long = np.flatnonzero(np.diff(trace.request_starts) >= LEAST)
    drawn = np.random.default_rng(seed).permutation(long)[:number]
    return [trace.select([r]) for r in drawn]


def misses(requests: Stream, trace: Trace, k: int, name: str, seed: int) -> int:
    base, scope = ONLINE[name]
    done = replay(requests, trace.offsets, k, policy(base), scope=scope, pin="none", seed=seed)
    return done.misses


def over_opt(trace: Trace, share: float, seed: int) -> dict[str, float]:
    """Each policy's misses on one request, divided by OPT's."""
    requests, k = stream(trace, "rounds"), int(share * experts_of(trace))
    floor = int(opt_curve(requests, trace.offsets).misses[k - 1])
    return {name: misses(requests, trace, k, name, seed) / floor for name in ONLINE}


def quartiles(ratios: list[dict[str, float]]) -> str:
    """First and third quartile of LLRU's misses over OPT's."""
    low, high = np.percentile([one["LLRU"] for one in ratios], (25, 75))
    return f"{low:.2f} to {high:.2f}"


def savings_rows(model: str, trace: Trace, tokens: int, seed: int) -> list[list[object]]:
    """Table rows of the misses that LLRU saves against LRU, in both orders of requests."""
    rows = []
    for order in ("natural", "rounds"):
        requests, cells = stream(trace, order, tokens), []
        for share in (0.2, 0.4, 0.6):
            k = int(share * experts_of(trace))
            lru, llru = (misses(requests, trace, k, n, seed) for n in ("LRU", "LLRU"))
            cells.append(percent(1 - llru / lru))
        rows.append([MODELS[model], min(tokens, trace.tokens), order, *cells])
    return rows


def main(args: argparse.Namespace) -> None:
    number = 3 if args.quick else 10
    fig, panels = figure(2, len(args.models), 1.2 + 1.75 * len(args.models), 4.6)
    spread, long = [], []
    for column, (model, trace) in enumerate(recordings(args).items()):
        long += savings_rows(model, trace, limit(args), args.seed)
        requests = some(trace, number, args.seed)
        for axes, (text, share) in zip(panels[:, column], SHARES.items(), strict=True):
            ratios = [over_opt(one, share, args.seed) for one in requests]
            boxes = axes.boxplot(
                [[one[name] for one in ratios] for name in ONLINE], widths=0.6, patch_artist=True,
                medianprops={"color": "#222222"}, flierprops={"markersize": 3},
            )  # fmt: skip
            for box, name in zip(boxes["boxes"], ONLINE, strict=True):
                box.set(facecolor=COLOURS[name], alpha=0.75, linewidth=0.8)
            axes.set_xticks(range(1, 1 + len(ONLINE)), list(ONLINE), rotation=60, ha="right",
                            rotation_mode="anchor")  # fmt: skip
            axes.grid(axis="x", visible=False)
            if share == min(SHARES.values()):
                axes.set_title(MODELS[model].replace(" (", "\n("), fontsize=8.5)
                axes.tick_params(labelbottom=False)
            if column == 0:
                axes.set_ylabel(f"misses / OPT, k = {text}")
            mean = {name: np.mean([one[name] for one in ratios]) for name in ONLINE}
            against = {
                name: np.mean([1 - one["LLRU"] / one[name] for one in ratios]) for name in ONLINE
            }
            spread.append([
                MODELS[model], len(ratios), text, *(f"{mean[name]:.2f}" for name in ONLINE),
                percent(against["LRU"]), percent(against["LRU-Dist"]), quartiles(ratios),
            ])  # fmt: skip
    save(fig, args, "llru-spread")
    table(
        args, "llru-spread",
        ["recording", "requests", "k", *(f"{name} / OPT" for name in ONLINE),
         "LLRU's gain over LRU", "over LRU-Dist", "LLRU / OPT, quartiles"],
        spread,
    )  # fmt: skip
    table(
        args, "llru-whole",
        ["recording", "tokens", "order", "LLRU's gain over LRU at 20 %", "at 40 %", "at 60 %"], long
    )  # fmt: skip


if __name__ == "__main__":
    main(options(__doc__).parse_args())
