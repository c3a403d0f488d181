"""MoEpic's ablation (Table 3), split ratios (figure 4b) and granularity (figure 9b), simulated.

    python benchmarks/papers/moepic.py TRACE [TRACE ...] [--capacity 25%] [--ratio 2]

As benchmarks/split.py: an expert computes in 1 ms, the rest of a layer in 1 ms, and an expert is
carried in --ratio ms; the first half of the tokens is what Algorithm 1 looks at, the second half is
timed. `w/o SP` prefetches at random (each guess is right as often as chance is), `w/o LCP` evicts
at random, `w/o CCA` has equal budgets and cuts every expert in the middle; as in the paper's Table
3, factors are of the whole. A ratio of 0 (`prefetch only`) cannot be had: an eighth stays at least;
`cache only` is whole experts without prefetching.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from split import CHUNK, EXPERT, costs, halves

from greenroom.cli.output import columns
from greenroom.core.cost import Costs
from greenroom.plan.configurator import Choice, Latency, configure, layers_of
from greenroom.plan.recorded import foreseen
from greenroom.policies import policy
from greenroom.sim.proactive import proactive
from greenroom.sim.sweep import capacities
from greenroom.sim.timed import Times
from greenroom.trace import Trace, stream

EIGHTHS = [n / 8 for n in range(1, 9)]
ZETAS = (0.005, 0.01, 0.02, 0.05, 0.1)


def timed(
    trace: Trace, capacity: int, machine: Costs, prefetch: str, evicts: str, **way: Any
) -> Times:
    """A run of the trace with so much memory."""
    return proactive(
        trace, stream(trace, "runtime"), capacity, policy(evicts), machine, EXPERT, prefetch,
        chunk_bytes=CHUNK, **way,
    ).times  # fmt: skip


def ways(chosen: list[Choice]) -> dict[str, Any]:
    """What Algorithm 1 chose, as options of a simulation."""
    found: dict[str, Any] = {"scope": tuple(c.budget for c in chosen)}
    if any(round(8 * c.ratio) < 8 for c in chosen):
        found["split"] = tuple(c.ratio for c in chosen)
    return found


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def ablation(trace: Trace, capacity: int, machine: Costs, args: Any, whole: Any) -> str:
    """Table 3."""
    chance = trace.top_k / float(trace.experts_per_layer.mean())
    random = f"noisy-oracle:accuracy={chance:.3f}"
    equal = {"scope": "per-layer", "split": 0.5}
    rows, first = [], None
    for name, prefetch, evicts, way in (
        ("MoEpic", args.prefetch, "lcp", whole),
        ("w/o SP", random, "lcp", whole),
        ("w/o LCP", args.prefetch, "random", whole),
        ("w/o CCA", args.prefetch, "lcp", equal),
    ):
        found = timed(trace, capacity, machine, prefetch, evicts, **way)
        pair = float(np.mean(found.ttft)), float(np.mean(found.gaps))
        first = first or pair
        factors = [f"{a / b:.2f}" for a, b in zip(pair, first, strict=True)]
        rows.append([name, ms(pair[0]), factors[0], ms(pair[1]), factors[1]])
    return columns(["", "TTFT ms", "x", "TPOT ms", "x"], rows)


def ratios(trace: Trace, capacity: int, machine: Costs, args: Any) -> str:
    """Figure 4b, with equal budgets."""
    rows = []
    for share in EIGHTHS:
        split = {"split": share} if share < 1 else {}
        found = timed(trace, capacity, machine, args.prefetch, "lcp", scope="per-layer", **split)
        rows.append([f"{share:g}", ms(float(found.gaps.mean()))])
    alone = timed(trace, capacity, machine, "off", "lcp", scope="per-layer")
    return columns(["theta", "TPOT ms"], [*rows, ["cache only", ms(float(alone.gaps.mean()))]])


def granularity(trace: Trace, capacity: int, machine: Costs, args: Any, layers: Any) -> str:
    """Figure 9b."""
    latency, rows = Latency.of(machine, EXPERT, trace.top_k), []
    for zeta in ZETAS:
        chosen = configure(layers, float(capacity), latency, zeta=zeta)
        found = timed(trace, capacity, machine, args.prefetch, "lcp", **ways(chosen))
        expected = latency.head + sum(latency.attention + latency.moe + c.exposed for c in chosen)
        rows.append([f"{zeta:g}", ms(float(found.gaps.mean())), ms(expected)])
    return columns(["zeta", "TPOT ms", "Algorithm 1 expects"], rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--capacity", default="25%")
    parser.add_argument("--ratio", type=float, default=2.0, help="transfer / compute")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prefetch", default="noisy-oracle:accuracy=0.8")
    args = parser.parse_args()
    machine = costs(args.ratio)
    for path in args.traces:
        made, trace = halves(path, args.tokens)
        layers = layers_of(foreseen(made, args.prefetch))
        latency = Latency.of(machine, EXPERT, trace.top_k)
        for capacity in capacities(args.capacity, int(trace.offsets[-1])):
            chosen = configure(layers, float(capacity), latency)
            thetas = [c.ratio for c in chosen]
            print(
                f"{path.name}: {trace.tokens} tokens, {capacity} slots, transfer / compute"
                f" {args.ratio:g}, theta {min(thetas):.2f} to {max(thetas):.2f}\n"
            )
            print(ablation(trace, capacity, machine, args, ways(chosen)), "\n", flush=True)
            print(ratios(trace, capacity, machine, args), "\n", flush=True)
            print(granularity(trace, capacity, machine, args, layers), "\n", flush=True)


if __name__ == "__main__":
    main()
