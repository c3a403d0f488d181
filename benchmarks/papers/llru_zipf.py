"""LLRU paper, figure 6: OPT with one cache for all layers against a cache for each layer.

Zipf traces, one expert a layer. (a) parameter a = 2, k = 16 slots, 1 to 15 layers of 1 to 15
experts; (b) k = 64 slots, 32 layers of 8 experts, a from 0 to 8. OPT-Dist has k // layers slots a
layer and one more in the first k % layers; `--split floor` leaves the remainder unused.
"""

from __future__ import annotations

import argparse

import numpy as np
from common import figure, options, save, table
from matplotlib.ticker import MultipleLocator

from greenroom.config import ZipfConfig
from greenroom.core.stream import Stream
from greenroom.sim.curves import opt_curve
from greenroom.trace import stream
from greenroom.trace.synth import zipf


def ratio(options: ZipfConfig, k: int, split: str) -> float:
    """Misses of OPT-Dist over those of OPT with k slots, 1 where all fits."""
    trace = zipf(options)
    requests, offsets = stream(trace, "natural"), trace.offsets
    total = int(offsets[-1])
    return misses(requests, offsets, min(slots(k, options.layers, split), total), "per-layer") / (
        misses(requests, offsets, min(k, total), "shared")
    )


def slots(k: int, layers: int, split: str) -> int:
    return k if split == "spread" else k // layers * layers


def misses(requests: Stream, offsets: np.ndarray, capacity: int, scope: str) -> int:
    curve = opt_curve(requests, offsets, scope=scope)
    return int(curve.misses[np.searchsorted(curve.capacities, capacity)])


def grid(args: argparse.Namespace, tokens: int, seeds: int) -> np.ndarray:
    """[15 experts, 15 layers] mean ratios."""
    grid_ratios = np.ones((15, 15))
    for layers in range(1, 16):
        for experts in range(1, 16):
            if layers * experts > 16:
                grid_ratios[experts - 1, layers - 1] = np.mean([
                    ratio(
                        ZipfConfig(layers=layers, experts=experts, tokens=tokens, a=2.0,
                                   seed=args.seed + s),
                        16, args.split,
                    )
                    for s in range(seeds)
                ])  # fmt: skip
    return grid_ratios


def line(args: argparse.Namespace, exponents: np.ndarray, tokens: int, seeds: int) -> np.ndarray:
    """[seeds, exponents] ratios."""
    return np.array([
        [
            ratio(
                ZipfConfig(layers=32, experts=8, tokens=tokens, a=float(a), seed=args.seed + s),
                64, args.split,
            )
            for a in exponents
        ]
        for s in range(seeds)
    ])  # fmt: skip


def main(args: argparse.Namespace) -> None:
    tokens, seeds = (300, 1) if args.quick else (2000, 3)
    exponents = np.arange(0, 8.01, 1.0 if args.quick else 0.25)
    heat = grid(args, tokens, seeds)
    curve = line(args, exponents, tokens, seeds)
    fig, panels = figure(1, 2, 7.6, 3.4, width_ratios=[1.05, 1])
    left, right = panels[0]
    left.set_title("(a) a = 2, k = 16")
    image = left.imshow(
        heat,
        origin="lower",
        extent=(0.5, 15.5, 0.5, 15.5),
        cmap="YlOrRd",
        vmin=1,
        vmax=max(3, heat.max()),
    )
    left.set(xlabel="layers", ylabel="experts a layer")
    left.grid(False)
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_locator(MultipleLocator(2, offset=1))
    experts, layers = (int(i) + 1 for i in np.unravel_index(heat.argmax(), heat.shape))
    left.plot(layers, experts, "o", mfc="none", mec="#222222", ms=9, mew=1.2)
    left.text(layers - 0.8, experts, f"{heat.max():.2f}", ha="right", va="center")
    fig.colorbar(image, ax=left, label="OPT-Dist / OPT", shrink=0.92)
    right.set_title("(b) 32 layers of 8 experts, k = 64")
    mean = curve.mean(axis=0)
    right.fill_between(exponents, curve.min(axis=0), curve.max(axis=0), color="#d55e00", alpha=0.2)
    right.plot(exponents, mean, color="#d55e00")
    right.plot(exponents[mean.argmax()], mean.max(), "o", mfc="none", mec="#222222", ms=9)
    right.annotate(
        f"{mean.max():.2f} at a = {exponents[mean.argmax()]:g}",
        (exponents[mean.argmax()], mean.max()), xytext=(14, -2), textcoords="offset points",
        color="#222222",
    )  # fmt: skip
    right.set(xlabel="exponent a of the Zipf law", ylabel="OPT-Dist / OPT", xlim=(0, 8))
    right.set_ylim(1)
    name = "llru-zipf" if args.split == "spread" else "llru-zipf-floor"
    save(fig, args, name)
    table(
        args, name, ["panel", "paper", "here", "where"],
        [
            ["(a), largest", "up to 3", heat.max(), f"{layers} layers of {experts} experts"],
            ["(b), largest", "up to 1.8", mean.max(), f"a = {exponents[mean.argmax()]:g}"],
            ["(b), a = 0", "still above 1", mean[0], ""],
            ["(b), a = 8", "near 1", mean[-1], ""],
        ],
    )  # fmt: skip


if __name__ == "__main__":
    parser = options(__doc__, traces=False)
    parser.add_argument(
        "--split", choices=("spread", "floor"), default="spread", help="(default: spread)"
    )
    main(parser.parse_args())
