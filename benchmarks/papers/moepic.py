"""MoEpic's table 3 and figures 4b, 9a and 9b: ablation, split ratios, hyper-parameters; simulated.

    python benchmarks/papers/moepic.py --traces DIR [--models NAME ...] [--capacity 25%] [--ratio 2]

As benchmarks/split.py: an expert computes in 1 ms, the rest of a layer in 1 ms, and an expert is
carried in --ratio ms; Algorithm 1 is given the first half of the tokens, the second half is
timed. All prefetch as the paper does, down the ranks of all experts while there is time
(`--prefetch-rule all`). `w/o SP` ranks at random. `w/o LCP` evicts at random, `w/o CCA` has
equal budgets and cuts every expert in the middle; as in the paper's Table 3, factors are of the
whole. A ratio of 0 (`prefetch only`) cannot be had: an eighth stays at least; `cache only` is whole
experts without prefetching. The paper does not name its five settings of rho and omega: SETTINGS
are ours.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))  # after this folder: both have a common.py

from split import CHUNK, EXPERT, costs, halves

from common import options, percent, table  # isort: skip
from greenroom.core.config.scheduler import NO_OPTIONS, with_options
from greenroom.core.cost import Costs
from greenroom.plan.configurator import LayerAllocation, TokenLatency, configure, layer_statistics
from greenroom.plan.sizing import predicted_activity
from greenroom.policies import policy
from greenroom.sim.event_driven import EventOptions, EventRun, simulate_events
from greenroom.sim.study import capacities
from greenroom.trace import Trace, stream

EIGHTHS = [n / 8 for n in range(1, 9)]
ZETAS = (0.005, 0.01, 0.02, 0.05, 0.1)
SETTINGS = ((0.25, 128), (0.25, 32), (0.25, 512), (0.1, 128), (0.5, 128))  # rho, omega; default
BY_RANK = with_options(NO_OPTIONS, prefetch_rule="all")


def timed(
    trace: Trace, capacity: int, machine: Costs, prefetch: str, evicts: str, seed: int, **way: Any
) -> EventRun:
    """A run of the trace with so much memory."""
    return simulate_events(
        trace, stream(trace, "runtime"), capacity, policy(evicts), machine, EXPERT, prefetch,
        EventOptions(chunk_bytes=CHUNK, seed=seed, **way),
    )  # fmt: skip


def ways(chosen: list[LayerAllocation]) -> dict[str, Any]:
    """The choice of Algorithm 1, as options of a simulation."""
    options: dict[str, Any] = {"scope": tuple(c.budget for c in chosen)}
    if any(round(8 * c.ratio) < 8 for c in chosen):
        options["split"] = tuple(c.ratio for c in chosen)
    return options


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def ablation(
    trace: Trace, capacity: int, machine: Costs, args: Any, layer_curves: Any, name: str
) -> None:
    """Table 3."""
    chance = trace.top_k / float(trace.experts_per_layer.mean())
    predicted, guesses = (
        f"{args.prefetch},width=all",
        f"noisy-oracle:accuracy={chance:.3f},width=all",
    )
    equal = {"scope": "per-layer", "split": 0.5}
    rows, first = [], None
    for label, prefetch, evicts, way in (
        ("MoEpic", predicted, "lcp", layer_curves),
        ("w/o SP", guesses, "lcp", layer_curves),
        ("w/o LCP", predicted, "random", layer_curves),
        ("w/o CCA", predicted, "lcp", equal),
    ):
        result = timed(trace, capacity, machine, prefetch, evicts, args.seed, config=BY_RANK, **way)
        pair = float(np.mean(result.times.ttft)), float(np.mean(result.times.gaps))
        first = first or pair
        factors = [f"{a / b:.2f}" for a, b in zip(pair, first, strict=True)]
        rows.append(
            [
                label,
                ms(pair[0]),
                factors[0],
                ms(pair[1]),
                factors[1],
                result.as_json()["prefetches"],
            ]
        )
    table(args, name, ["", "TTFT ms", "x", "TPOT ms", "x", "prefetches begun"], rows)


def ratios(trace: Trace, capacity: int, machine: Costs, args: Any, name: str) -> None:
    """Figure 4b, with equal budgets."""
    rows = []
    for share in EIGHTHS:
        split = {"split": share} if share < 1 else {}
        result = timed(
            trace, capacity, machine, f"{args.prefetch},width=all", "lcp", args.seed,
            scope="per-layer", config=BY_RANK, **split,
        )  # fmt: skip
        rows.append([f"{share:g}", ms(float(result.times.gaps.mean()))])
    cache_only = timed(trace, capacity, machine, "off", "lcp", args.seed, scope="per-layer")
    rows.append(["cache only", ms(float(cache_only.times.gaps.mean()))])
    table(args, name, ["theta", "TPOT ms"], rows)


def sensitivity(
    trace: Trace, capacity: int, machine: Costs, args: Any, layer_curves: Any, name: str
) -> None:
    """Figure 9a."""
    rows = []
    for rho, omega in SETTINGS:
        result = timed(
            trace, capacity, machine, f"{args.prefetch},width=all",
            f"lcp:rho={rho},omega={omega}", args.seed, config=BY_RANK, **layer_curves,
        )  # fmt: skip
        times, missed = result.times, result.times.misses / result.times.requests
        rows.append([rho, omega, ms(float(times.gaps.mean())), percent(missed)])
    table(args, name, ["rho", "omega", "TPOT ms", "misses"], rows)


def granularity(
    trace: Trace, capacity: int, machine: Costs, args: Any, layers: Any, name: str
) -> None:
    """Figure 9b."""
    latency, rows = TokenLatency.of(machine, EXPERT, trace.top_k), []
    for zeta in ZETAS:
        chosen = configure(layers, float(capacity), latency, zeta=zeta)
        result = timed(
            trace, capacity, machine, f"{args.prefetch},width=all", "lcp", args.seed,
            config=BY_RANK, **ways(chosen),
        )  # fmt: skip
        expected = latency.head + sum(latency.attention + latency.moe + c.exposed for c in chosen)
        rows.append([f"{zeta:g}", ms(float(result.times.gaps.mean())), ms(expected)])
    table(args, name, ["zeta", "TPOT ms", "Algorithm 1 expects"], rows)


def main(args: argparse.Namespace) -> None:
    machine, tokens = costs(args.ratio), 60 if args.quick else args.tokens
    for model in args.models:
        training, trace = halves(args.traces / f"{model}.npz", tokens)
        layers = layer_statistics(predicted_activity(training, args.prefetch))
        latency = TokenLatency.of(machine, EXPERT, trace.top_k)
        for capacity in capacities(args.capacity, int(trace.offsets[-1])):
            chosen = configure(layers, float(capacity), latency)
            thetas = [c.ratio for c in chosen]
            print(
                f"{model}: {trace.tokens} tokens, {capacity} slots, transfer / compute"
                f" {args.ratio:g}, theta {min(thetas):.2f} to {max(thetas):.2f}\n"
            )
            name = f"moepic-{model}-{capacity}"
            ablation(trace, capacity, machine, args, ways(chosen), f"{name}-ablation")
            ratios(trace, capacity, machine, args, f"{name}-ratios")
            sensitivity(trace, capacity, machine, args, ways(chosen), f"{name}-settings")
            granularity(trace, capacity, machine, args, layers, f"{name}-zeta")


if __name__ == "__main__":
    parser = options(__doc__)
    parser.set_defaults(models=["olmoe-1b-7b"])
    parser.add_argument("--capacity", default="25%")
    parser.add_argument("--ratio", type=float, default=2.0, help="transfer / compute")
    parser.add_argument(
        "--tokens", type=int, default=400, help="timed, after as many (60 with --quick)"
    )
    parser.add_argument("--prefetch", default="noisy-oracle:accuracy=0.8")
    main(parser.parse_args())
