"""ProMoE's figures of latency: systems, ablation, cache rates and bit widths, simulated.

    python benchmarks/papers/promoe_latency.py

Figures 3 and 4 (LRU over the cache rate), 11 and 12 (systems), 13 and 14 (the techniques one after
another), 15 to 17 (cache rates) and 23 to 25 (bits a weight), with the demo model's routing and
what its trained predictors predicted. `promoe_bench.py` has the machine. Static and LRU are
reactive: experts are computed by id, and a missing one is read when its turn comes. ProMoE predicts
--distance layers ahead.
"""

from __future__ import annotations

import argparse
from functools import partial

from common import figure, options, percent, save, share_of_legend, table
from promoe_bench import (
    BLOCKED,
    COLOURS,
    DISTANCES,
    LRU,
    STATIC,
    Bench,
    Measured,
    System,
    add_demo,
    demo_of,
    proactive,
)

RATES = (1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
# Figure, machine, the width that the machine stands for, and whether the cache keeps its rate.
WIDTHS = (
    ("23", "llama.cpp", 16, True),
    ("24", "llama.cpp", 4, False),
    ("25", "transformers", 16, True),
)
STEPS = {
    "base": lambda name, k: LRU,
    "+ prefetch": lambda name, k: System("access", 1, name, k),
    "+ chunked prefetch": lambda name, k: System("access", 3, name, k),
    "+ early preemption": lambda name, k: System("id", 3, name, k),
    "+ reordered inference": lambda name, k: System("cached", 3, name, k),
    "prompts by Greenroom": lambda name, k: System("resident", 3, name, k),
}


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def times(value: float) -> str:
    return f"{value:.2f}"


def systems(args: argparse.Namespace, benches: dict[str, Bench]) -> None:
    """Figures 11 and 12: TTFT and TPOT with half of the experts."""
    rows = {
        "static": STATIC,
        "lru": LRU,
        "next-gate (skip-based), k = 1": proactive("next-gate", 1),
        "token": proactive("token", 1),
        "pre-gated": proactive("pregated", 1),
        **{f"promoe, k = {k}": proactive("learned", k) for k in DISTANCES},
        "perfect predictions, k = 4": proactive("perfect", 4),
    }
    shown = []
    for machine, bench in benches.items():
        base = {name: bench.measure(each, 0.5) for name, each in rows.items()}
        for name, each in base.items():
            shown.append([
                machine, name, ms(each.ttft), times(base["lru"].ttft / each.ttft), ms(each.tpot),
                times(base["lru"].tpot / each.tpot), times(base["static"].tpot / each.tpot),
            ])  # fmt: skip
    header = ["machine", "system", "TTFT ms", "x LRU", "TPOT ms", "x LRU", "x static"]
    table(args, "promoe-systems", header, shown)


def ablation(args: argparse.Namespace, benches: dict[str, Bench]) -> None:
    """Figures 13 and 14: one technique after another, from LRU to ProMoE."""
    shown = []
    fig, panels = figure(1, 2 * len(benches), 7.6, 2.6)
    for column, (machine, bench) in enumerate(benches.items()):
        steps = [bench.measure(step("learned", args.distance), 0.5) for step in STEPS.values()]
        for name, each in zip(STEPS, steps, strict=True):
            shown.append([
                machine, name, ms(each.ttft), times(steps[0].ttft / each.ttft), ms(each.tpot),
                times(steps[0].tpot / each.tpot),
            ])  # fmt: skip
        for place, what in enumerate(("ttft", "tpot")):
            axes = panels[0, 2 * column + place]
            axes.bar(
                range(len(STEPS)), [getattr(each, what) * 1e3 for each in steps], color="#d55e00"
            )
            axes.set(title=f"{machine}: {what.upper()}, ms")
            axes.set_xticks(range(len(STEPS)), ["B", "+P", "+C", "+E", "+R", "G"])
    save(fig, args, "promoe-ablation")
    header = ["machine", "step", "TTFT ms", "x base", "TPOT ms", "x base"]
    table(args, "promoe-ablation", header, shown)


def cells(measured: list[Measured]) -> list[str]:
    """TTFT and TPOT of several systems, each with the share of time that is waited."""
    ttft = [f"{ms(each.ttft)} ({percent(each.prompt_wait)})" for each in measured]
    return [*ttft, *(f"{ms(each.tpot)} ({percent(each.token_wait)})" for each in measured)]


def rates(args: argparse.Namespace, benches: dict[str, Bench]) -> None:
    """Figures 3, 4 and 15 to 17: latency, and the share of it that is waited, by cache rate."""
    compared = {"static": STATIC, "lru": LRU, "promoe": proactive("learned", args.distance)}
    chosen = RATES[1:4] if args.quick else RATES
    fig, panels = figure(2, len(benches), 3.4 * len(benches), 4.6)
    shown = []
    for column, (machine, bench) in enumerate(benches.items()):
        points = {name: [bench.measure(each, r) for r in chosen] for name, each in compared.items()}
        for name, measured in points.items():
            for row, what in enumerate(("ttft", "tpot")):
                values = [getattr(each, what) * 1e3 for each in measured]
                panels[row, column].plot(
                    chosen, values, "o-", ms=3.5, color=COLOURS[name], label=name
                )
        for number, rate in enumerate(chosen):
            shown.append([
                machine, percent(rate), *cells([each[number] for each in points.values()])
            ])  # fmt: skip
        panels[0, column].set(title=machine, ylabel="TTFT, ms")
        panels[1, column].set(xlabel="share of the experts in memory", ylabel="TPOT, ms")
    share_of_legend(fig, panels[0, 0], 3)
    save(fig, args, "promoe-rates")
    header = ["machine", "cached", *(f"TTFT, {name}" for name in compared)]
    table(args, "promoe-rates", [*header, *(f"TPOT, {name}" for name in compared)], shown)


def widths(args: argparse.Namespace, benches: dict[str, Bench]) -> None:
    """Figures 23 to 25: bits a weight, which change the time of a transfer alone."""
    promoe = proactive("learned", args.distance)
    shown = []
    for number, machine, own, keeps_rate in WIDTHS:
        bench = benches[machine]
        for bits in (16, 8, 4):
            rate = 0.5 if keeps_rate else 0.5 * own / bits
            measure = partial(bench.measure, share=rate, factor=bits / own)
            static, lru, ours = measure(STATIC), measure(LRU), measure(promoe)
            shown.append([
                number, machine, bits, percent(rate), ms(ours.ttft), times(static.ttft / ours.ttft),
                times(lru.ttft / ours.ttft), ms(ours.tpot), times(static.tpot / ours.tpot),
                times(lru.tpot / ours.tpot),
            ])  # fmt: skip
    header = ["figure", "machine", "bits", "cached", "TTFT ms", "x static", "x LRU"]
    table(args, "promoe-bits", [*header, "TPOT ms", "x static", "x LRU"], shown)


def main(args: argparse.Namespace) -> None:
    demo = demo_of(args, args.requests)
    benches = {machine: Bench(demo, machine) for machine in BLOCKED}
    shown = [
        [machine, f"{bench.transfer * 1e3:.3f}", times(bench.transfer * 4 / 1e-3)]
        for machine, bench in benches.items()
    ]
    table(args, "promoe-machines", ["machine", "expert ms", "load / compute of a layer"], shown)
    for draw in (systems, ablation, rates, widths):
        draw(args, benches)


if __name__ == "__main__":
    parser = options(__doc__, traces=False)
    add_demo(parser)
    parser.add_argument("--distance", type=int, choices=DISTANCES, default=4, help="of ProMoE")
    parser.add_argument("--requests", type=int, help="how many requests (default: all)")
    main(parser.parse_args())
