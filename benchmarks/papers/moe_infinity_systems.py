"""MoE-Infinity, table 1 and figures 7 and 9: latency of systems, and of collections of EAMs.

    python benchmarks/papers/moe_infinity_systems.py --traces DIR [--models NAME ...]

The machine is that of table 1, for DeepSeek-V2-Lite: a link of 24 GB/s, and experts of 17.3 MB, so
that the experts of a token take 112 ms if all are fetched. A token computes for 104 ms, which is
what table 1 leaves of MoE-Infinity's 155 ms without its GPU's idle time. Another model's token has
the same times. The share of the experts that has slots is not in the paper: 17 % is figure 8's at
2^12 tokens, 70 % is what a GPU of 24 GB has beside the dense parts.

Every request has a prompt of --prompt tokens, one pass, and an answer of 32 tokens (the paper: 512
and 32). The timed requests begin with an empty cache; policies and predictors have learned from
--earlier other requests. The order of requests is drawn. The systems, as the paper describes them:

    vLLM                on-demand fetching, LRU (4.7)
    DeepSpeed           LRU, and every expert of the next layer is prefetched, whatever is used
    BrainStorm          counts of the model: LFU, and the experts that are used most are prefetched
    Mixtral-Offloading  LRU with equal shares, and the next layer's gate: a noisy oracle with the
                        demo model's accuracy
    MoE-Infinity        its policy and predictor

`cache alone` is MoE-Infinity without prefetching, `prefetch alone` has LRU. `idle` is the time in
which computation waits. The transfer queue is Greenroom's for all: misses go first, and prefetches
end when their layer's routing is known.

The second table has MoE-Infinity's TPOT by the capacity of its collections (figure 9), after
--earlier-9 requests, with slots for 35 % of the experts.
"""

from __future__ import annotations

import argparse

import numpy as np
from common import MODELS, experts_of, figure, options, recordings, save, share_of_legend, table

from greenroom.core.cost import Costs, Link, Work
from greenroom.plan.systems.cells import simulate_systems
from greenroom.plan.systems.table import ALL, System, system
from greenroom.sim.study import Row, Study
from greenroom.sim.sweep import sweep
from greenroom.trace import Trace
from greenroom.trace.trace import starts_of

EXPERT, USED, LINK = 3 * 2048 * 1408 * 2, 26 * 6, 24e9  # bytes, experts of a token, bytes/s
COMPUTE = 0.155 - 0.051  # seconds of a token
ANSWER = 32  # tokens
SHARES = (0.17, 0.35, 0.7)
CAPACITIES = (1, 5, 20, 60, 120)  # EAMs in a collection
COLOURS = {
    "vLLM": "#0072b2",
    "DeepSpeed": "#cc79a7",
    "BrainStorm": "#56b4e9",
    "Mixtral-Offloading": "#009e73",
    "MoE-Infinity": "#d55e00",
    "cache alone": "#e69f00",
    "prefetch alone": "#f0e442",
    "greenroom": "#4d4d4d",
}


def systems_of(trace: Trace) -> list[System]:
    """The systems; what each replaces is in this module's docstring."""
    by_index = trace.top_k / int(trace.experts_per_layer[0])  # right no more often than by chance
    chosen = {
        "vLLM": {},
        "DeepSpeed": {"prefetch": f"noisy-oracle:1,accuracy={by_index:.4f},width=all", "rule": ALL},
        "BrainStorm": {"policy": "lfu", "prefetch": "popularity:1,half-life=1000000"},
        "Mixtral-Offloading": {"scope": "per-layer", "prefetch": "next-gate:1"},
        "MoE-Infinity": {"policy": "moe-infinity", "prefetch": "eamc:2"},
        "cache alone": {"policy": "moe-infinity"},
        "prefetch alone": {"prefetch": "eamc:2"},
    }
    described = [System(name, "MoE-Infinity", "", **parts) for name, parts in chosen.items()]
    return [*described, system("greenroom")]


def requests_of(recording: Trace, drawn: np.ndarray, prompt: int) -> Trace:
    """Requests of equal length: a prompt, which is one pass, and an answer."""
    length = prompt + ANSWER
    rows = (recording.request_starts[drawn][:, None] + np.arange(length)).ravel()
    return Trace(
        experts=recording.experts[rows],
        experts_per_layer=recording.experts_per_layer,
        request_starts=starts_of(np.full(len(drawn), length)),
        pass_starts=starts_of(np.tile([prompt, *[1] * ANSWER], len(drawn))),
        pass_prefill=np.tile([True, *[False] * ANSWER], len(drawn)),
        labels=tuple(recording.labels[r] for r in drawn),
    )


def parts_of(recording: Trace, args: argparse.Namespace, before: int) -> tuple[Trace, Trace]:
    """Earlier requests, at most `before`, and those that are timed."""
    lengths = np.diff(recording.request_starts)
    long_enough = np.flatnonzero(lengths >= args.prompt + ANSWER)
    drawn = np.random.default_rng(args.seed).permutation(long_enough)[: before + args.timed]
    earlier, timed = drawn[: -args.timed], drawn[-args.timed :]
    return requests_of(recording, earlier, args.prompt), requests_of(recording, timed, args.prompt)


def costs_of(trace: Trace) -> Costs:
    """The paper's machine; of another model, a token's experts take the link as long."""
    factor = USED / (trace.layers * trace.top_k)
    link = Link(LINK / factor, 0.0, 1)
    return Costs((link,), Work.constant(1e-6), Work.constant(COMPUTE / trace.layers))


def study_of(timed: Trace, seed: int) -> Study:
    """The timed requests on the paper's machine."""
    return Study.of(timed, "runtime", costs=costs_of(timed), expert_bytes=EXPERT,
                    chunk_bytes=EXPERT, seed=seed)  # fmt: skip


def by_capacity(recording: Trace, args: argparse.Namespace) -> list[str]:
    """The number of earlier requests, and MoE-Infinity's TPOT in ms by capacity (figure 9)."""
    earlier, timed = parts_of(recording, args, args.earlier_9)
    study, slots = study_of(timed, args.seed), [int(SHARES[1] * experts_of(timed))]
    times = []
    for capacity in CAPACITIES[:2] if args.quick else CAPACITIES:
        chosen = System("MoE-Infinity", "", "", policy=f"moe-infinity:capacity={capacity}",
                        prefetch=f"eamc:2,capacity={capacity}")  # fmt: skip
        (row,) = simulate_systems([chosen], {}, study, slots, sweep, earlier)
        times.append(f"{1e3 * row['tpot_mean_s']:.1f}")
    return [str(earlier.requests), *times]


def shown(row: Row) -> str:
    """Mean TPOT, its 95th percentile and idle time in ms."""
    mean, tail = row["tpot_mean_s"], row["tpot_p95_s"]
    return f"{1e3 * mean:.0f} / {1e3 * tail:.0f} / {1e3 * (mean - COMPUTE):.0f}"


def main(args: argparse.Namespace) -> None:
    shares = SHARES[1:2] if args.quick else SHARES
    if args.quick:
        args.earlier, args.earlier_9, args.timed, args.prompt = 4, 4, 1, ANSWER
    fig, panels = figure(1, len(args.models), 0.6 + 2.35 * len(args.models), 3.2, sharey=True)
    rows, capacities = [], []
    for (model, recording), axes in zip(recordings(args).items(), panels.flat, strict=True):
        earlier, timed = parts_of(recording, args, args.earlier)
        study = study_of(timed, args.seed)
        slots = [int(share * experts_of(timed)) for share in shares]
        for each in systems_of(timed):
            found = simulate_systems([each], {}, study, slots, sweep, earlier)
            times = [row["tpot_mean_s"] for row in found]
            axes.plot(shares, times, "o-", ms=3.5, color=COLOURS[each.name], label=each.name)
            hits = [f"{100 * (1 - row['miss_ratio']):.0f} %" for row in found]
            rows.append([MODELS[model], each.name, *map(shown, found), ", ".join(hits)])
        capacities.append([MODELS[model], *by_capacity(recording, args)])
        axes.axhline(COMPUTE, color="#888888", linewidth=0.8, linestyle=":")
        axes.set_title(MODELS[model], fontsize=8.5)
        axes.set(xlabel="share of the experts with slots")
    panels[0, 0].set_ylabel("TPOT, seconds")
    share_of_legend(fig, panels[0, 0], 4)
    save(fig, args, "moe-infinity-systems")
    header = ["recording", "system", *(f"{100 * share:.0f} %" for share in shares), "hits"]
    table(args, "moe-infinity-systems", header, rows)
    header = [f"{each} EAMs" for each in (CAPACITIES[:2] if args.quick else CAPACITIES)]
    table(args, "moe-infinity-capacity", ["recording", "requests before", *header], capacities)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.set_defaults(models=["olmoe-1b-7b", "gpt-oss-20b", "deepseek-v2-lite"])
    parser.add_argument("--earlier", type=int, default=60, help="requests before (default: 60)")
    parser.add_argument("--earlier-9", type=int, default=150, help="of the table by capacity")
    parser.add_argument("--timed", type=int, default=8, help="timed requests (default: 8)")
    parser.add_argument("--prompt", type=int, default=96, help="tokens of a prompt (default: 96)")
    main(parser.parse_args())
