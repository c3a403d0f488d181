"""LLRU paper, section 3: the lower bounds of Theorems 3.1 to 3.4 and the collectors of 3.5.

Each instance is the one of its proof (`instances.py`). The figure has the ratio to OPT
and the bound; the table has each theorem's bound at one size. Expected cover times are exact
(lines) and drawn (dots). A second table has the exact competitive ratios of LRU and LLRU for small
shapes (`competitive.py`): the most that any request sequence can do.
"""

from __future__ import annotations

import argparse

import competitive
import instances
import numpy as np
from common import COLOURS, figure, options, save, table

from greenroom.policies import policy
from greenroom.sim.curves import opt_curve
from greenroom.sim.replay import replay
from greenroom.trace import Trace, stream

EXPERTS = 4
LAYERS = (1, 2, 4, 8, 16)
SHAPES = (
    *((1, 3, 2), (1, 4, 3), (2, 2, 2), (2, 2, 3), (3, 2, 2), (3, 2, 3), (3, 2, 4), (3, 2, 5)),
    *((2, 3, 2), (2, 3, 3), (2, 3, 4), (2, 3, 5), (4, 2, 4), (4, 2, 5), (4, 2, 6), (4, 2, 7)),
)  # layers, experts, slots
ONLINE = {"LRU": "lru", "LLRU": "llru", "LFU": "lfu", "Marking": "marking"}


def misses(trace: Trace, name: str, k: int, scope: str = "shared", seed: int = 0) -> int:
    requests = stream(trace, "natural")
    done = replay(requests, trace.offsets, k, policy(name), scope=scope, pin="none", seed=seed)
    return done.misses


def opt(trace: Trace, k: int) -> int:
    return int(opt_curve(stream(trace, "natural"), trace.offsets).misses[k - 1])


def fixed_shares(args: argparse.Namespace, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Theorem 3.1: (rounds, misses of LRU-Dist over OPT's), on traces that grow."""
    lengths = np.unique(np.geomspace(10, rounds, 10).astype(int))
    ratios = []
    for length in lengths.tolist():
        trace = instances.one_cycles(8, EXPERTS, length)
        k = EXPERTS + 8 - 1
        ratios.append(misses(trace, "lru", k, "per-layer") / opt(trace, k))
    return lengths, np.array(ratios)


def beyond_start(trace: Trace, name: str, k: int, seed: int = 0) -> float:
    """Misses over OPT's, both without the first one of each expert (the constant c)."""
    first = k + 1
    return (misses(trace, name, k, seed=seed) - first) / max(opt(trace, k) - first, 1)


def exact_rows(shapes: list[competitive.Shape]) -> list[list[object]]:
    """Table rows of exact competitive ratios, and of LLRU's replayed on its worst trace."""
    rows = []
    for shape in shapes:
        ratios = {}
        for name, serve in (("lru", competitive.lru), ("llru", competitive.llru)):
            graph = competitive.search(shape, serve)
            ratios[name], cycle = competitive.worst_cycle(graph)
        short, long = (competitive.worst_trace(shape, graph, cycle, times) for times in (10, 40))
        replayed = (misses(long, "llru", shape.slots) - misses(short, "llru", shape.slots)) / (
            opt(long, shape.slots) - opt(short, shape.slots)
        )
        rows.append([*shape, ratios["lru"], ratios["llru"], replayed])
    return rows


def main(args: argparse.Namespace) -> None:
    rounds = 500 if args.quick else 5000
    rows = []
    fig, panels = figure(2, 2, 7.6, 5.6)
    first, second, third, fourth = panels.flat

    lengths, ratios = fixed_shares(args, rounds)
    first.set_title("3.1  Fixed shares: unbounded")
    first.loglog(lengths, ratios, "o-", ms=3.5, color=COLOURS["LRU-Dist"], label="LRU-Dist")
    first.loglog(
        lengths,
        lengths / EXPERTS / opt(instances.one_cycles(8, EXPERTS, rounds), 11),
        ":",
        color=COLOURS["OPT"],
        label="bound",
    )
    first.set(xlabel="rounds", ylabel="misses / OPT")
    first.legend()
    rows.append(
        [
            "3.1",
            "8 layers of 4, k = 11, LRU-Dist",
            "grows without end",
            f"{ratios[0]:.2f} to {ratios[-1]:.1f} in {lengths[-1]} rounds",
        ]
    )

    sizes = np.array([layers * EXPERTS - 1 for layers in LAYERS])
    second.set_title("3.2, 3.3  Deterministic policies")
    for name in ("LRU", "LLRU", "LFU"):
        results = [
            beyond_start(
                instances.cruel(policy(ONLINE[name]), n, EXPERTS, rounds),
                ONLINE[name],
                n * EXPERTS - 1,
            )
            for n in LAYERS
        ]
        second.plot(sizes, results, "o-", ms=3.5, color=COLOURS[name], label=f"{name}, cruel trace")
        rows.append(
            [
                "3.2",
                f"16 layers of 4, {name}",
                f"at least {sizes[-1] - 16 + 1}",
                f"{results[-1]:.1f}",
            ]
        )
    cycling = [
        beyond_start(instances.all_cycle(n, EXPERTS, rounds), "lru", n * EXPERTS - 1)
        for n in LAYERS
    ]
    second.plot(sizes, cycling, "s--", ms=3.5, color=COLOURS["LRU"], label="LRU, all layers cycle")
    second.plot(sizes, sizes - np.array(LAYERS) + 1, ":", color=COLOURS["OPT"], label="bounds")
    second.plot(sizes, sizes, ":", color=COLOURS["OPT"])
    second.set(xlabel="slots k (4 experts a layer)", ylabel="misses / OPT")
    second.legend(fontsize=7.5)
    rows.append(["3.3", "16 layers of 4, LRU", f"at least {sizes[-1]}", f"{cycling[-1]:.1f}"])

    third.set_title("3.4  Uniform requests")
    times = np.array([instances.expected_cover_time(EXPERTS, n) for n in LAYERS])
    bound = np.array([instances.cover_bound(EXPERTS, n) for n in LAYERS]) / EXPERTS
    for name, base in ONLINE.items():
        results = [
            beyond_start(
                instances.uniform(n, EXPERTS, 4 * rounds, args.seed),
                base,
                n * EXPERTS - 1,
                args.seed,
            )
            for n in LAYERS
        ]
        third.plot(LAYERS, results, "o-", ms=3.5, color=COLOURS[name], label=name)
        rows.append(
            ["3.4", f"1 layer of 4, {name}", f"at least {bound[0]:.2f}", f"{results[0]:.2f}"]
        )
        rows.append(
            ["3.4", f"16 layers of 4, {name}", f"at least {bound[-1]:.2f}", f"{results[-1]:.2f}"]
        )
    third.plot(LAYERS, times / EXPERTS, "--", color="#888888", label="E(T) / n")
    third.plot(LAYERS, bound, ":", color=COLOURS["OPT"], label="bound")
    third.set_xscale("log", base=2)
    third.set_xticks(LAYERS, [str(n) for n in LAYERS])
    third.set(xlabel="layers of 4 experts, k = 4 layers - 1", ylabel="misses / OPT")
    third.set_ylim(0)
    third.legend(fontsize=7.5, ncols=2)

    fourth.set_title("3.5  Collectors in parallel")
    collectors = 2 ** np.arange(0, 8 if args.quick else 11)
    for coupons, colour in ((2, "#0072b2"), (8, "#d55e00"), (64, "#009e73")):
        exact = [instances.expected_cover_time(coupons, int(c)) for c in collectors]
        drawn = [
            instances.cover_times(coupons, int(c), 20 if args.quick else 100, args.seed).mean()
            for c in collectors
        ]
        least = [instances.cover_bound(coupons, int(c)) for c in collectors]
        fourth.loglog(collectors, exact, color=colour, label=f"{coupons} coupons")
        fourth.loglog(collectors, drawn, "o", ms=3, color=colour)
        fourth.loglog(collectors, least, ":", color=colour)
        rows.append(
            [
                "3.5",
                f"{coupons} coupons, {collectors[-1]} collectors",
                f"at least {least[-1]:.2f}",
                f"{exact[-1]:.2f} ({drawn[-1]:.2f} drawn)",
            ]
        )
    fourth.set(xlabel="collectors", ylabel="rounds until all have all")
    fourth.set_ylim(top=9e3)
    fourth.legend(fontsize=7.5, ncols=3, title="dotted: bound", title_fontsize=7.5)
    save(fig, args, "llru-bounds")
    table(args, "llru-bounds", ["theorem", "instance", "bound", "here"], rows)
    shapes = [competitive.Shape(*shape) for shape in SHAPES[: 5 if args.quick else None]]
    table(
        args, "llru-exact",
        ["layers", "experts", "k", "ratio of LRU", "of LLRU", "LLRU's worst trace replayed"],
        exact_rows(shapes),
    )  # fmt: skip


if __name__ == "__main__":
    main(options(__doc__, traces=False).parse_args())
