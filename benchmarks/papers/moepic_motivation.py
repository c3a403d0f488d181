"""MoEpic's figures 2a and 2b (caching alone) and 4a (latency by layer).

    python benchmarks/papers/moepic_motivation.py --traces DIR [--models NAME ...]

Figure 2a: hit ratio and memory of caches with the same number of slots in every layer. Figure 2b:
the time of a token over the hit ratio, without prefetching, as a multiple of the time with every
expert in memory. Figure 4a: every expert is cut in the middle, LFU caches the tops of half of the
experts of each layer, and an oracle that is right in --accuracy of its guesses prefetches; the mean
seconds of each layer, from the end of the layer before to its own end.

The machine is made up (`paper_costs`): loading the experts of a token takes 2.9 times as long as
computing, as in figure 2d on an A6000 (165 ms and 57 ms), and a layer's experts compute as long as
its attention.
"""

from __future__ import annotations

import argparse

import numpy as np
from common import (
    BY_MODEL,
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
from moepic_lcp import ROWS, hit_ratio, sixths

from greenroom.core.build import build_scheduler
from greenroom.core.cache.buffer import default_borrow_limit
from greenroom.core.config.scheduler import NO_OPTIONS
from greenroom.core.cost import Costs, Link, Work
from greenroom.policies import policy
from greenroom.sim.clock import Clock
from greenroom.sim.event_driven import passes, split_pieces
from greenroom.sim.foresight import foresight_of
from greenroom.sim.timed import time_trace
from greenroom.trace import Trace, stream

EXPERT, CHUNK = 1 << 20, 1 << 18
LOADING = 165 / 57  # loading over computing of a token, all experts missed (figure 2d, A6000)
PARTS = ("RND", "LFU", "LRU")  # of figure 2a


def paper_costs(top_k: int) -> Costs:
    """The costs of a machine with the paper's ratio of loading to computing.

    A layer without misses takes 2 ms, half of it for its experts.
    """
    load = LOADING * 2e-3 / top_k
    link = Link(EXPERT / load, 0.0, 1)
    return Costs((link,), Work.constant(1e-3 / top_k), Work.constant(1e-3))


def slowdown(trace: Trace, slots: int, name: str, seed: int) -> tuple[float, float]:
    """Hit ratio of a cache, and a token's time over that with all experts in memory."""
    result = time_trace(
        trace, stream(trace, "runtime"), slots * trace.layers, policy(name),
        paper_costs(trace.top_k), EXPERT, scope="per-layer", seed=seed, chunk_bytes=CHUNK,
    )  # fmt: skip
    return 1 - result.misses / result.requests, float(result.gaps.mean()) / (2e-3 * trace.layers)


def by_layer(trace: Trace, prefetch: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean seconds of each layer, and each layer's hit ratio of tops."""
    costs, requests = paper_costs(trace.top_k), stream(trace, "runtime")
    pieces = split_pieces(trace, EXPERT, 0.5, CHUNK)
    assert pieces.split is not None
    tops = trace.layers * (int(trace.experts_per_layer[0]) // 2)
    memory = tops * pieces.split.tops[0] + pieces.split.reserved
    scheduler = build_scheduler(
        pieces, -(-memory // EXPERT), policy("lfu"), NO_OPTIONS, scope="per-layer",
        lanes=costs.lanes, ahead=default_borrow_limit(trace.top_k), seed=seed,
    )  # fmt: skip
    clock = Clock(scheduler, costs, foresight_of(trace, prefetch, seed))
    spent, missed, used = np.zeros((3, trace.layers))
    counted = 0
    for at, steps in passes(trace, requests):
        clock.begin(at)
        for step in steps:
            begin, misses = clock.now, scheduler.view.misses
            clock.run(step)
            if not at.prefill:
                spent[step.layer] += clock.now - begin
                missed[step.layer] += scheduler.view.misses - misses
                used[step.layer] += step.experts.size
        counted += not at.prefill
    return spent / counted, 1 - missed / used


def figure_2a(args: argparse.Namespace) -> None:
    fig, panels = figure(2, 2, 7.6, 5.2)
    rows = []
    for (model, recording), axes in zip(recordings(args).items(), panels.flat, strict=False):
        trace = recording.head(limit(args))
        requests, slots = stream(trace, "natural"), sixths(trace)
        experts = int(trace.experts_per_layer[0])
        for name in PARTS:
            hits = [hit_ratio(requests, trace, n, ROWS[name], args.seed) for n in slots]
            axes.plot(np.array(slots) / experts, hits, "o-", ms=3.5, color=COLOURS[name],
                      label=name)  # fmt: skip
            rows.append([MODELS[model], name, *map(percent, hits)])
        rows.append([MODELS[model], "experts in memory", *(percent(n / experts) for n in slots)])
        axes.set(title=MODELS[model], xlim=(0, 1), ylim=(0, 1))
    for axes in panels.flat[len(args.models) :]:
        axes.set_visible(False)
    for axes in panels[-1]:
        axes.set_xlabel("share of a layer's experts that is cached (memory)")
    for axes in panels[:, 0]:
        axes.set_ylabel("hit ratio")
    share_of_legend(fig, panels[0, 0], 3)
    save(fig, args, "moepic-caching")
    header = ["recording", "policy", "1/6 of the experts", "2/6", "3/6", "4/6", "5/6"]
    table(args, "moepic-caching", header, rows)


def figure_2b(args: argparse.Namespace) -> None:
    fig, panels = figure(1, 1, 4.6, 3.0)
    axes, rows = panels[0, 0], []
    for model, recording in recordings(args).items():
        trace = recording.head(min(limit(args), args.tokens))
        if trace.pass_prefill.all():
            continue  # prompts only: there is no decoded token
        points = sorted(
            slowdown(trace, n, ROWS[name], args.seed) for n in sixths(trace) for name in PARTS
        )
        hits, times = np.array(points).T
        axes.plot(hits, times, "o", ms=3.5, color=BY_MODEL[model], label=MODELS[model])
        rows.append([
            MODELS[model], trace.tokens, percent(hits.min()), f"{times[0]:.2f}",
            f"{np.interp(0.4, hits, times):.2f}" if hits.min() <= 0.4 else "-",
            f"{np.interp(0.8, hits, times):.2f}",
        ])  # fmt: skip
    axes.set(xlabel="hit ratio", ylabel="TPOT over that with all in memory", xlim=(0, 1))
    axes.set_ylim(bottom=0.9)
    share_of_legend(fig, axes, 2)
    save(fig, args, "moepic-hit-latency")
    header = ["recording", "tokens", "least hit ratio", "TPOT, x", "at 40 %", "at 80 %"]
    table(args, "moepic-hit-latency", header, rows)


def figure_4a(args: argparse.Namespace) -> None:
    fig, panels = figure(1, 1, 5.6, 3.0)
    axes, rows = panels[0, 0], []
    for model, recording in recordings(args).items():
        trace = recording.head(min(limit(args), args.tokens))
        if trace.pass_prefill.all():
            continue
        seconds, hits = by_layer(trace, f"noisy-oracle:1,accuracy={args.accuracy}", args.seed)
        axes.plot(seconds * 1e3, "o-", ms=3.5, color=BY_MODEL[model], label=MODELS[model])
        slowest = np.argsort(-seconds)[:3]
        later = seconds[1:]
        rows.append([
            MODELS[model], f"{1e3 * later.mean():.2f}", f"{later.max() / later.mean():.2f}",
            f"{later.min() / later.mean():.2f}", ", ".join(str(n) for n in sorted(slowest)),
            f"{percent(hits.min())} to {percent(hits.max())}",
            f"{np.corrcoef(later, hits[1:])[0, 1]:.2f}",
        ])  # fmt: skip
    axes.set(xlabel="layer", ylabel="ms")
    axes.set_ylim(bottom=0)
    share_of_legend(fig, axes, 2)
    save(fig, args, "moepic-layers")
    header = ["recording", "mean ms", "slowest / mean", "fastest / mean", "slowest three",
              "hits by layer", "correlation of time and hits"]  # fmt: skip
    table(args, "moepic-layers", header, rows)


def main(args: argparse.Namespace) -> None:
    figure_2a(args)
    figure_2b(args)
    figure_4a(args)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.set_defaults(limit=12_000)
    parser.add_argument(
        "--tokens", type=int, default=400, help="of figures 2b and 4a (default: %(default)s)"
    )
    parser.add_argument("--accuracy", type=float, default=0.8)
    args = parser.parse_args()
    args.tokens = 60 if args.quick else args.tokens
    main(args)
