"""Compare eviction policies on a trace, from Python: a table, and a plot of misses by capacity.

    python examples/simulate.py [TRACE] [--plot misses.png]

Without TRACE it makes a synthetic one. In a notebook the last line of a cell is enough:

    greenroom.simulate("run.trace", "lru,auto,opt", "10%,25%,50%")
"""

from __future__ import annotations

import argparse
from pathlib import Path

import greenroom
from greenroom.config import TopicsConfig
from greenroom.sim.simulation import Simulation
from greenroom.trace import Trace, load
from greenroom.trace.synth import topics

POLICIES = ["lru", "lfu", "llru", "auto", "opt"]
CAPACITIES = ["10%", "25%", "50%", "75%"]


def compare(trace: Trace, policies: list[str], shares: list[str]) -> Simulation:
    """What every policy misses at every capacity, in the order in which a run asks."""
    found = greenroom.simulate(trace, policies, shares, order="runtime")
    print(found)
    return found


def show_gap(found: Simulation) -> None:
    """How much of the gap from LRU to the optimum each policy closes, at the least capacity."""
    misses = {name: values[0] for name, (_, values) in found.curves("misses").items()}
    gap = misses["lru"] - misses["opt"]
    print()
    for name, count in misses.items():
        if name not in ("lru", "opt") and gap:
            print(f"{name} closes {(misses['lru'] - count) / gap:.0%} of the gap from LRU to OPT")


def plot(found: Simulation, path: Path) -> None:
    """Miss ratios by capacity, a line a policy; needs matplotlib."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    for name, (sizes, ratios) in found.curves().items():
        axes.plot(sizes, ratios, marker="o", label=name)
    axes.set(xlabel="capacity in experts", ylabel="miss ratio")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--plot", type=Path, metavar="FILE")
    args = parser.parse_args()
    small = TopicsConfig(layers=8, experts=32, top_k=4, tokens=2000, requests=20)
    trace = topics(small) if args.trace is None else load(args.trace)
    found = compare(trace, POLICIES, CAPACITIES)
    show_gap(found)
    if args.plot is not None:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
