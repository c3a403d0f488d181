"""MoEpic's figures 7 and 8: systems over memory, and the least memory for a target TPOT, simulated.

    python benchmarks/papers/moepic_systems.py --traces DIR [--models NAME ...] [--limit 300]

The systems are those of the paper, and Greenroom's defaults, as `simulate --system` plays them:
noisy oracles replace the gates, and what a system learns, it learns from the requests before (half
of 2 * --tokens tokens, in whole requests). Prompts are made of the first --prompt tokens of each
request, which the recordings have decoded; a prompt is one pass. The machine is
`moepic_motivation.paper_costs`. Figure 8 is the search of `greenroom plan --target-tpot` (a
bisection over the number of slots, since more are never slower), for one system after the other;
targets are multiples of the TPOT with all experts in memory.
"""

from __future__ import annotations

import argparse
import sys
from functools import cache
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))  # after this folder: both have a common.py

from moepic_motivation import EXPERT, paper_costs
from split import CHUNK, halves

from common import MODELS, figure, options, save, share_of_legend, table  # isort: skip
from greenroom.plan.systems.cells import simulate_systems
from greenroom.plan.systems.table import system
from greenroom.sim.study import Row, Study
from greenroom.sim.sweep import sweep
from greenroom.trace import Trace
from greenroom.trace.trace import starts_of

SYSTEMS = {  # and their colours
    "pre-gated": "#cc79a7",
    "mixtral-offloading": "#0072b2",
    "adapmoe": "#009e73",
    "moe-infinity": "#e69f00",
    "moepic": "#d55e00",
    "greenroom": "#4d4d4d",
}
SHARES = (1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2)  # of all experts; the paper's: 1/6 to 1/3, 3/8 to 5/8
FEW = (3 / 8, 1 / 2, 5 / 8)  # with eight experts a layer
TARGETS = (1.05, 1.1, 1.25, 1.5, 2.0)
STEPS = 32  # capacities that are told apart


def prompted(trace: Trace, tokens: int) -> Trace:
    """The trace with the first tokens of each request as a prompt, one pass each."""
    first, lengths = trace.request_starts[:-1], np.diff(trace.request_starts)
    sizes, prefill = [], []
    for length in lengths.tolist():
        prompt = min(tokens, length - 1)
        sizes += [prompt] * (prompt > 0) + [1] * (length - prompt)
        prefill += [True] * (prompt > 0) + [False] * (length - prompt)
    assert first[0] == 0
    return Trace(
        experts=trace.experts,
        experts_per_layer=trace.experts_per_layer,
        request_starts=trace.request_starts,
        pass_starts=starts_of(np.array(sizes)),
        pass_prefill=np.array(prefill),
        weights=trace.weights,
        labels=trace.labels,
    )


class Bench:
    """One recording: its systems are simulated once for each number of slots."""

    def __init__(self, path: Path, tokens: int, prompt: int, seed: int) -> None:
        self.earlier, timed = halves(path, tokens)
        self.trace = prompted(timed, prompt)
        self.costs, self.experts = paper_costs(timed.top_k), int(timed.offsets[-1])
        self.rich = 2e-3 * timed.layers  # seconds of a token with all experts in memory
        self.study = Study.of(
            self.trace, "runtime", costs=self.costs, expert_bytes=EXPERT, chunk_bytes=CHUNK,
            seed=seed,
        )  # fmt: skip
        self.of = cache(self._of)

    def _of(self, name: str, capacity: int) -> Row:
        (row,) = simulate_systems([system(name)], {}, self.study, [capacity], sweep, self.earlier)
        return row

    def least(self, name: str, target: float) -> int | None:
        """The fewest slots with which a system's TPOT is at most `target` times that of all."""
        step = max(1, self.experts // STEPS)
        layers = len(self.trace.experts_per_layer)
        below, meets = (layers - 1) // step, self.experts // step
        while meets - below > 1:
            middle = (below + meets) // 2
            if self.of(name, middle * step)["tpot_mean_s"] <= target * self.rich:
                meets = middle
            else:
                below = middle
        return meets * step


def main(args: argparse.Namespace) -> None:
    fig, panels = figure(2, len(args.models), 3.8 * len(args.models), 5.2)
    times, least = [], []
    targets = TARGETS[2:4] if args.quick else TARGETS
    for column, model in enumerate(args.models):
        bench = Bench(
            args.traces / f"{model}.npz", 80 if args.quick else args.tokens, args.prompt, args.seed
        )
        shares = SHARES if bench.trace.experts_per_layer[0] > 8 else FEW
        shares = shares[1:3] if args.quick else shares
        for name, colour in SYSTEMS.items():
            rows = [bench.of(name, int(share * bench.experts)) for share in shares]
            tpot = [row["tpot_mean_s"] / bench.rich for row in rows]
            ttft = [row["ttft_mean_s"] * 1e3 for row in rows]
            for axes, values in zip(panels[:, column], (ttft, tpot), strict=True):
                axes.plot(shares, values, "o-", ms=3.5, color=colour, label=name)
            times.append([
                MODELS[model], name,
                *(f"{a:.0f} / {b:.2f}" for a, b in zip(ttft, tpot, strict=True)),
                *["-"] * (len(SHARES) - len(shares)),
            ])  # fmt: skip
            least.append([
                MODELS[model], name,
                *(f"{100 * bench.least(name, each) / bench.experts:.0f} %" for each in targets),
            ])  # fmt: skip
        panels[0, column].set(title=MODELS[model], ylabel="TTFT, ms")
        panels[1, column].set(
            xlabel="share of the experts in memory", ylabel="TPOT over that with all in memory"
        )
    share_of_legend(fig, panels[0, 0], 3)
    save(fig, args, "moepic-systems")
    header = ["recording", "system", *(f"size {n}" for n in range(1, len(SHARES) + 1))]
    table(args, "moepic-systems", header, times)
    header = ["recording", "system", *(f"{target:g} x" for target in targets)]
    table(args, "moepic-memory", header, least)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.set_defaults(models=["olmoe-1b-7b", "mixtral-8x7b"])
    parser.add_argument("--tokens", type=int, default=200, help="timed, after as many")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    main(parser.parse_args())
