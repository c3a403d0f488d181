"""ProMoE, figures 18 to 22: throughput and latency over the batch size, simulated.

    python benchmarks/papers/promoe_batches.py --traces DIR [--models NAME ...]

A batch has --prompt tokens of each of n requests in one pass, and then one token of each in every
pass. All batch sizes have the same requests. LRU and static are reactive, as the paper's baselines:
experts are computed by id, and a missing one is read as a whole when its turn comes
(`--expert-order access`). `promoe` computes those in memory first and caches a prompt's misses
(`cached`). LRU has equal slots for each layer in both: with shared slots, a prompt's misses would
evict the next layer's experts, and reordering could not end the thrashing (5.3). `static` and
`promoe` are rows of docs/systems.md, and know earlier requests. A noisy oracle with the demo
model's accuracy replaces the trained predictor.

The machine has the rates of section 2.2 (transformers, DeepSeek-MoE, half of the experts cached):
23.9 GB/s to the GPU, on one lane, in three chunks an expert (5.1). 67.9 ms a token less 58.1 ms of
fetching are 0.35 ms a layer; reading six experts of 16.5 MiB at 0.9 TB/s is a third of that. In a
prompt 82.7 % of the time are waits; if all experts are fetched, the rest is 0.15 ms an expert,
which ours take from 16 tokens on.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
from common import MODELS, figure, heads, options, percent, recordings, save, share_of_legend, table

from greenroom.core.config.scheduler import with_options
from greenroom.core.cost import Costs, Link, Work
from greenroom.plan.systems.cells import simulate_systems
from greenroom.plan.systems.table import system
from greenroom.predictors import OFF
from greenroom.sim.study import Cell, Row, Study
from greenroom.sim.sweep import sweep
from greenroom.trace import Trace
from greenroom.trace.trace import starts_of

SIZES = (1, 2, 4, 8)
EXPERT = 12 << 20
BUS, GPU, LAYER_S = 23.9e9, 0.9e12, 0.235e-3
MANY, MANY_S = 16, 0.15e-3  # tokens of an expert, and the time to compute them
SYSTEMS = {"lru": "#0072b2", "static": "#e69f00", "promoe": "#d55e00"}  # and their colours
ORDERS = {"lru": "access", "static": "access", "promoe": "cached"}


def batches(trace: Trace, requests: np.ndarray, size: int, prompt: int, answer: int) -> Trace:
    """Some requests in batches: one pass with all prompts, then passes with a token of each."""
    rows, sizes, prefill = [], [], []
    for group in requests.reshape(-1, size):
        begins = trace.request_starts[group]
        rows += [np.arange(begin, begin + prompt) for begin in begins]
        rows += [begins + prompt + token for token in range(answer)]
        sizes += [size * prompt, *[size] * answer]
        prefill += [True, *[False] * answer]
    groups = len(requests) // size
    return Trace(
        experts=trace.experts[np.concatenate(rows)],
        experts_per_layer=trace.experts_per_layer,
        request_starts=starts_of(np.full(groups, size * (prompt + answer))),
        pass_starts=starts_of(np.array(sizes)),
        pass_prefill=np.array(prefill),
        labels=("",) * groups,
    )


def machine(nbytes: int) -> Costs:
    """The costs of the paper's machine, for experts of so many bytes."""
    expert = Work(((1, nbytes / GPU), (MANY, MANY_S), (1 << 62, MANY_S)))
    return Costs((Link(BUS, 0.0, 1),), expert, Work.constant(LAYER_S))


def simulate(study: Study, name: str, capacity: int, earlier: Trace) -> Row:
    """Simulate one system on a trace of batches."""
    config = with_options(study.config, expert_order=ORDERS[name])
    chunk = EXPERT // 3 if name == "promoe" else EXPERT
    study = replace(study, config=config, chunk_bytes=chunk)
    if name == "static":
        return simulate_systems([system(name)], {}, study, [capacity], sweep, earlier)[0]
    study, given = replace(study, scope="per-layer"), {"scope": "per-layer"}
    if name == "lru":
        return study.run(Cell("lru", capacity, "step", OFF))
    return simulate_systems([system(name)], given, study, [capacity], sweep, earlier)[0]


def main(args: argparse.Namespace) -> None:
    fig, panels = figure(2, len(args.models), 3.6 * len(args.models), 5.0)
    lines, missed = [], []
    for column, (model, trace) in enumerate(recordings(args).items()):
        tokens = args.prompt + args.answer
        long = np.flatnonzero(np.diff(trace.request_starts) >= tokens)
        count = SIZES[-1] if args.quick else args.requests
        earlier, chosen = heads(trace, tokens, long[:count]), long[count : 2 * count]
        capacity = int(args.share * trace.offsets[-1])
        sizes = SIZES[::3] if args.quick else SIZES
        rates: dict[str, list[tuple[float, float]]] = {name: [] for name in SYSTEMS}
        for size in sizes:
            batched_trace = batches(trace, chosen, size, args.prompt, args.answer)
            study = Study.of(
                batched_trace, "runtime", costs=machine(EXPERT), expert_bytes=EXPERT,
                seed=args.seed,
            )  # fmt: skip
            rows = [simulate(study, name, capacity, earlier) for name in SYSTEMS]
            ttft = [row["ttft_mean_s"] * 1e3 for row in rows]
            tpot = [row["tpot_mean_s"] * 1e3 for row in rows]
            for name, first, later in zip(SYSTEMS, ttft, tpot, strict=True):
                rates[name].append((size * args.prompt / first * 1e3, size / later * 1e3))
            cells: list[str] = []
            for stage, times in enumerate((ttft, tpot)):
                last = [rates[name][-1][stage] for name in SYSTEMS]
                cells += [f"{rate:.0f} ({ms:.0f})" for rate, ms in zip(last, times, strict=True)]
                cells += [f"{times[other] / times[2]:.2f}" for other in (0, 1)]
            lines.append([MODELS[model], size, *cells])
            missed.append([MODELS[model], size, *(percent(row["miss_ratio"]) for row in rows)])
        for name, colour in SYSTEMS.items():
            for axes, values in zip(panels[:, column], zip(*rates[name], strict=True), strict=True):
                axes.plot(sizes, values, "o-", ms=3.5, color=colour, label=name)
        panels[0, column].set(title=MODELS[model], ylabel="prefill, tokens/s")
        panels[1, column].set(xlabel="batch size", ylabel="decode, tokens/s")
    share_of_legend(fig, panels[0, 0], 3)
    save(fig, args, "promoe-batches")
    header = ["recording", "batch"]
    for stage in ("prefill", "decode"):
        header += [f"{stage}: {name}" for name in SYSTEMS] + ["promoe / lru", "/ static"]
    table(args, "promoe-batches", header, lines)
    table(args, "promoe-batches-misses", ["recording", "batch", *SYSTEMS], missed)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.set_defaults(models=["olmoe-1b-7b", "gpt-oss-20b"])
    parser.add_argument("--share", type=float, default=0.5, help="of the experts in memory")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--answer", type=int, default=24, help="tokens of each answer")
    parser.add_argument("--requests", type=int, default=32, help="timed, after as many others")
    main(parser.parse_args())
