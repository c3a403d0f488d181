"""MoE-Infinity, figure 9: how many EAMs the collection needs.

Miss ratio over the collection's capacity, with slots for a quarter of the experts, shared by the
layers. The load is mixed: requests of all kinds in a drawn order, the first 40 tokens of each
(--limit tokens in all), natural order, step pinning. `iteration` matches this pass's EAM as in
algorithm 1, `request` the counts since the request began. A second table has the miss ratio with
the largest collection by `tolerance`: EAMs whose cosine distance is at most the smallest one plus
the tolerance are matched and summed (section 4.5, "several matched EAMs").
"""

from __future__ import annotations

import argparse

import numpy as np
from common import (
    COLOURS,
    MODELS,
    experts_of,
    figure,
    heads,
    limit,
    options,
    percent,
    recordings,
    save,
    table,
)

from greenroom.policies import policy
from greenroom.sim.replay import replay
from greenroom.trace import stream

CAPACITIES = (1, 2, 5, 10, 20, 40, 80, 120)
TOLERANCES = (0, 0.01, 0.02, 0.05, 0.1, 0.2)
TOKENS = 40


def main(args: argparse.Namespace) -> None:
    capacities = CAPACITIES[::3] if args.quick else CAPACITIES
    fig, panels = figure(1, len(args.models), 0.6 + 2.35 * len(args.models), 2.9)
    rows, by_tolerance = [], []
    for (model, recording), axes in zip(recordings(args).items(), panels.flat, strict=True):
        drawn = np.random.default_rng(args.seed).permutation(recording.requests)
        trace = heads(recording, TOKENS, drawn[: max(limit(args) // TOKENS, 1)])
        requests, slots = stream(trace, "natural"), experts_of(trace) // 4

        def ratio(name: str) -> float:
            return replay(requests, trace.offsets, slots, policy(name)).miss_ratio  # noqa: B023

        lru = ratio("lru")
        axes.axhline(lru, color=COLOURS["LRU"], linestyle="--", linewidth=1.2, label="LRU")
        for matching, dash in (("request", "-"), ("iteration", (0, (2, 1)))):
            ratios = [ratio(f"moe-infinity:matching={matching},capacity={c}") for c in capacities]
            axes.plot(capacities, ratios, "o", ms=3.5, linestyle=dash,
                      color=COLOURS["MoE-Infinity"], label=f"by {matching}")  # fmt: skip
            best = int(np.argmin(ratios))
            small = max(round(0.03 * trace.requests), 1)
            near = int(np.argmin(np.abs(np.array(capacities) - small)))
            rows.append([MODELS[model], trace.requests, matching, percent(lru), percent(ratios[0]),
                         f"{percent(ratios[near])} ({capacities[near]})", percent(ratios[-1]),
                         f"{percent(ratios[best])} ({capacities[best]})"])  # fmt: skip
            largest = f"moe-infinity:matching={matching},capacity={capacities[-1]},tolerance="
            summed = [percent(ratio(f"{largest}{tolerance}")) for tolerance in TOLERANCES]
            by_tolerance.append([MODELS[model], matching, *summed])
        axes.set_title(MODELS[model], fontsize=8.5)
        axes.set(xlabel="EAMs in the collection", xlim=(0, 125))
        axes.legend(fontsize=7.5)
    panels[0, 0].set_ylabel("miss ratio, 25 % cached")
    save(fig, args, "eamc-capacity")
    table(args, "eamc-capacity",
          ["recording", "requests", "matching", "LRU", "1 EAM", "3 % of the requests (EAMs)",
           f"{capacities[-1]} EAMs", "best (EAMs)"], rows)  # fmt: skip
    header = ["recording", "matching", *(f"tolerance {tolerance:g}" for tolerance in TOLERANCES)]
    table(args, "eamc-tolerance", header, by_tolerance)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.set_defaults(limit=12_000, models=["olmoe-1b-7b", "gpt-oss-20b", "deepseek-v2-lite"])
    main(parser.parse_args())
