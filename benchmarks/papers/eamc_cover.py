"""MoE-Infinity, appendix B.1: how many EAMs cover all others at a cosine similarity.

The claim: 2 L E of them for 75 %, L E ln(L E) / 2 for 98 %, whatever the requests. The figure has
what recordings need (greedy cover; a minimum can be smaller), for whole requests and, so that there
are more EAMs than the bound, for windows of 8 tokens. The last column counts what the worst case
needs: EAMs of one token, top-1, agree in 75 % of the layers or are not 75 % similar; so E^L
of them over the ones within reach of one.
"""

from __future__ import annotations

import argparse
from math import ceil, comb, log, log10

import numpy as np
from common import BY_MODEL, MODELS, experts_of, figure, limit, options, recordings, save, table

from greenroom.trace import Trace
from greenroom.trace.groups import activation_matrices

WINDOW = 8
GRID = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.94, 0.96, 0.98)


def requests_of(trace: Trace) -> np.ndarray:
    """[requests, experts of all layers] unit vectors."""
    return unit(activation_matrices(trace))


def windows_of(trace: Trace, most: int, seed: int) -> np.ndarray:
    """[windows, experts of all layers] unit vectors of windows of WINDOW tokens, `most` drawn."""
    count = trace.tokens // WINDOW
    drawn = np.random.default_rng(seed).permutation(count)[:most]
    dense = (trace.experts[: count * WINDOW] + trace.offsets[:-1, None]).reshape(count, -1)
    eams = np.zeros((len(drawn), experts_of(trace)))
    for row, ids in zip(eams, dense[drawn], strict=True):
        np.add.at(row, ids, 1)
    return unit(eams)


def unit(eams: np.ndarray) -> np.ndarray:
    return (eams / np.linalg.norm(eams, axis=1, keepdims=True)).astype(np.float32)


def cover(similar: np.ndarray, least: float) -> int:
    """How many EAMs a greedy cover takes; `similar` [n, n] are cosines."""
    near = similar >= least - 1e-6
    gain, left, chosen_count = near.sum(axis=1), np.ones(len(near), np.bool_), 0
    while left.any():
        new = near[gain.argmax()] & left
        gain = gain - near[:, new].sum(axis=1)
        left &= ~new
        chosen_count += 1
    return chosen_count


def worst_case(layers: int, experts: int) -> float:
    """log10 of the EAMs that one-token, top-1 routing needs for 75 %."""
    different_layers = layers - ceil(0.75 * layers)
    reach = sum(comb(layers, i) * (experts - 1) ** i for i in range(different_layers + 1))
    return layers * log10(experts) - log10(reach)


def main(args: argparse.Namespace) -> None:
    fig, panels = figure(1, 2, 7.6, 3.3)
    rows = []
    for model, recording in recordings(args).items():
        trace, total = recording.head(limit(args)), experts_of(recording)
        for axes, eams in zip(
            panels[0],
            (requests_of(trace), windows_of(trace, 500 if args.quick else 5000, args.seed)),
            strict=True,
        ):
            similar = eams @ eams.T
            shares = [cover(similar, least) / len(eams) for least in GRID]
            axes.plot(GRID, shares, "o-", ms=3.5, color=BY_MODEL[model], label=MODELS[model])
            at = dict(zip(GRID, shares, strict=True))
            rows.append([
                MODELS[model],
                "request" if axes is panels[0, 0] else f"{WINDOW} tokens", len(eams),
                f"{2 * total:,}", round(at[0.75] * len(eams)),
                f"{total * log(total) / 2:,.0f}", round(at[0.98] * len(eams)),
                f"10^{worst_case(recording.layers, int(recording.experts_per_layer[0])):.0f}",
            ])  # fmt: skip
    for axes, title in zip(panels[0], ("whole requests", f"windows of {WINDOW} tokens"),
                           strict=True):  # fmt: skip
        axes.axvline(0.75, color="#999999", linewidth=0.8, linestyle=":")
        axes.axvline(0.98, color="#999999", linewidth=0.8, linestyle=":")
        axes.set(title=title, xlabel="cosine similarity to the nearest", ylim=(0, 1.03))
    panels[0, 0].set_ylabel("EAMs needed / EAMs seen")
    panels[0, 0].legend(fontsize=7.5)
    save(fig, args, "eamc-cover")
    table(args, "eamc-cover",
          ["recording", "an EAM is a", "EAMs", "2 L E", "needed for 75 %", "L E ln(L E) / 2",
           "needed for 98 %", "worst case for 75 %, at least"], rows)  # fmt: skip


if __name__ == "__main__":
    main(options(__doc__).parse_args())
