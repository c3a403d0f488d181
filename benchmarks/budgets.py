"""Per-layer slot budgets compared with a shared pool, on recordings of real models.

    python benchmarks/budgets.py TRACE [TRACE ...] [--capacity 12.5%,25%,50%] [--policy lru,auto]

Budgets are made from requests 0, 2, 4, ... of a trace and replayed, from an empty cache, on
requests 1, 3, 5, ...: misses as a share of the requested experts, order runtime. Prints a table for
each trace, with the change against the shared pool of the same policy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from greenroom.core.cache.scope import Scope
from greenroom.plan.budgets import METHODS, miss_tables
from greenroom.policies import policy
from greenroom.sim.replay import replay
from greenroom.sim.study import capacities
from greenroom.sim.table import text_table
from greenroom.trace import load, stream


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--capacity", default="12.5%,25%,50%")
    parser.add_argument("--policy", default="lru,auto")
    args = parser.parse_args()
    for path in args.traces:
        trace = load(path)
        training, held_out = (trace.select(np.arange(i, trace.requests, 2)) for i in (0, 1))
        tables = miss_tables(stream(training, "runtime"), training.offsets)
        requests = stream(held_out, "runtime")
        rows = []
        for name in args.policy.split(","):
            for capacity in capacities(args.capacity, int(trace.offsets[-1])):
                budgets = {n: find(tables, capacity) for n, find in METHODS.items()}
                scopes: dict[str, Scope] = {"shared": "shared", "per-layer": "per-layer"}
                scopes |= {n: tuple(map(float, slots)) for n, slots in budgets.items()}
                chosen = policy(name)
                results = {
                    scope: replay(requests, trace.offsets, capacity, chosen, scope=value).miss_ratio
                    for scope, value in scopes.items()
                }
                rows.append([
                    chosen.name, str(capacity), f"{results['shared']:.2%}",
                    *(f"{results[n]:.2%} ({results[n] / results['shared'] - 1:+.1%})"
                      for n in scopes if n != "shared"),
                    f"{min(budgets['optimal'])}-{max(budgets['optimal'])}",
                ])  # fmt: skip
        print(f"{path.name}: {held_out.requests} requests, {held_out.tokens} tokens")
        header = ["policy", "slots", "shared", "per-layer", *METHODS, "slots a layer"]
        print(text_table(header, rows), flush=True)


if __name__ == "__main__":
    main()
