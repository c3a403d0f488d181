"""LLRU paper, figure 4: misses over the size of the cache, on one request of each recording.

The request is the longest of its recording (at most 512 tokens of it), its experts in rounds as in
section 5.1 (a token's first expert in every layer, then its second, and so on); nothing is pinned.
The table has natural order too. LRU, LRU-Dist and OPT are whole curves. LLRU and Marking are
replayed at about 48 sizes from 1 to all experts, most of them small. LRU-Dist needs a slot a layer,
and is not compared below that. The steepest fall, of all sizes up to the experts of two tokens, is
how high the steps of a curve are.
"""

from __future__ import annotations

import argparse

import numpy as np
from common import (
    COLOURS,
    MODELS,
    experts_of,
    figure,
    options,
    recordings,
    save,
    share_of_legend,
    table,
)

from greenroom.policies import policy
from greenroom.sim.curves import MissCurve, lru_curve, opt_curve
from greenroom.sim.replay import replay
from greenroom.trace import Trace, stream

POINTS, TOKENS = 48, 512
DASHES = {"OPT": (0, (1, 1.2)), "LRU-Dist": (0, (4, 1.5)), "Marking": (0, (2, 1))}


def longest(trace: Trace) -> Trace:
    """The longest request, as a trace of its own."""
    return trace.select([int(np.argmax(np.diff(trace.request_starts)))])


def curves(trace: Trace, order: str, points: int, seed: int) -> dict[str, MissCurve]:
    """Misses by capacity for each policy of the figure."""
    requests, offsets, total = stream(trace, order), trace.offsets, experts_of(trace)
    sizes = np.unique([1, *(total * np.linspace(0, 1, points + 1)[1:] ** 1.7).astype(int)])
    sizes = sizes[sizes > 0]

    def replayed(name: str) -> MissCurve:
        misses = [
            replay(requests, offsets, int(k), policy(name), pin="none", seed=seed).misses
            for k in sizes
        ]
        return MissCurve(sizes, np.array(misses), requests.pieces.size)

    return {
        "OPT": opt_curve(requests, offsets),
        "Marking": replayed("marking"),
        "LRU-Dist": lru_curve(requests, offsets, scope="per-layer"),
        "LRU": lru_curve(requests, offsets),
        "LLRU": replayed("llru"),
    }


def at(curve: MissCurve, capacities: np.ndarray) -> np.ndarray:
    """Misses at the given capacities; not a number where they are too small for the curve."""
    misses = curve.misses[np.searchsorted(curve.capacities, capacities)]
    return np.where(capacities < curve.capacities[0], np.nan, misses)


def steepest(trace: Trace, order: str, most: int, seed: int) -> list[float]:
    """Largest share of the requests that one more slot saves, by LRU, LLRU and OPT: a step.

    Sizes are all from 1 to `most`, which has place for two tokens.
    """
    requests, offsets, sizes = stream(trace, order), trace.offsets, np.arange(1, most + 1)
    llru = [
        replay(requests, offsets, int(k), policy("llru"), pin="none", seed=seed).misses
        for k in sizes
    ]
    by_size = [
        at(lru_curve(requests, offsets), sizes),
        llru,
        at(opt_curve(requests, offsets), sizes),
    ]
    return [float(-np.diff(misses).min() / requests.pieces.size) for misses in by_size]


def row(
    model: str, trace: Trace, order: str, miss_curves: dict[str, MissCurve], seed: int
) -> list[object]:
    """The paper's statements on the figure in numbers, over the sizes of LLRU's replays."""
    sizes = miss_curves["LLRU"].capacities
    misses = {name: at(curve, sizes) for name, curve in miss_curves.items()}
    gain = 1 - misses["LLRU"] / misses["LRU"]
    online = np.array([misses[name] for name in ("Marking", "LRU-Dist", "LRU")])
    others = np.nanmin(online, axis=0)
    best = (misses["LLRU"] <= others).mean()
    behind = (misses["LLRU"] / others).max() - 1
    many = sizes > experts_of(trace) / 4
    k = int(sizes[gain.argmax()])
    over_dist = np.nanmean(misses["LRU-Dist"] / misses["LRU"] - 1)
    most = min(2 * trace.top_k * trace.layers, experts_of(trace))
    falls = steepest(trace, order, most, seed)
    ends = all(len({int(misses[name][end]) for name in misses if name != "LRU-Dist"}) == 1
               for end in (0, -1))  # fmt: skip
    return [
        MODELS[model], trace.tokens, order,
        f"{(misses['LRU'] / misses['OPT']).max():.2f}",
        f"{(misses['LLRU'] / misses['OPT']).max():.2f}",
        f"{100 * gain.max():.1f} % (k = {k})", f"{100 * gain.mean():.1f} %",
        f"{100 * gain[many].max():.1f} %",
        f"{100 * over_dist:.1f} %", f"{100 * best:.0f} %", f"{100 * behind:.1f} %",
        " / ".join(f"{100 * fall:.1f}" for fall in falls), "yes" if ends else "no",
    ]  # fmt: skip


def main(args: argparse.Namespace) -> None:
    rows = []
    fig, panels = figure(2, 2, 7.6, 5.6)
    for model, recording, axes in zip(
        args.models, recordings(args).values(), panels.flat, strict=False
    ):
        trace = longest(recording).head(60 if args.quick else TOKENS)
        for order in ("rounds", "natural"):
            miss_curves = curves(trace, order, 8 if args.quick else POINTS, args.seed)
            rows.append(row(model, trace, order, miss_curves, args.seed))
            if order == "rounds":
                for name, curve in miss_curves.items():
                    axes.plot(
                        curve.capacities, curve.misses / 1000, color=COLOURS[name],
                        linestyle=DASHES.get(name, "-"), label=name,
                    )  # fmt: skip
        axes.set_title(f"{MODELS[model]}, {trace.tokens} tokens")
        axes.set_xlim(0, experts_of(trace))
        axes.set_ylim(0)
    for axes in panels.flat[len(args.models) :]:
        axes.set_visible(False)
    for axes in panels[-1]:
        axes.set_xlabel("cache size k (experts)")
    for axes in panels[:, 0]:
        axes.set_ylabel("misses (thousands)")
    share_of_legend(fig, panels[0, 0], 5)
    save(fig, args, "llru-sweep")
    table(
        args, "llru-sweep",
        ["recording", "tokens", "order", "LRU / OPT at most", "LLRU / OPT at most",
         "LLRU's gain over LRU, best", "mean", "best beyond a quarter of the experts",
         "LRU-Dist's misses above LRU's, mean",
         "LLRU is the best online", "behind the best at most",
         "steepest fall, % a slot: LRU / LLRU / OPT",
         "all equal at both ends"],
        rows,
    )  # fmt: skip


if __name__ == "__main__":
    main(options(__doc__).parse_args())
