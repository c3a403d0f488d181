"""CPU time of the scheduler for a step: one layer of one token, with the policy's part.

    python benchmarks/scheduler_steps.py olmoe-1b-7b.npz --capacity 20% 60%

A recording is simulated event by event. The scheduler is called from Python with the events that it
gets in a run: a step's routing, chunks that have landed, groups that are computed. Its calls are
timed by their thread's clock, less what the clock itself takes. A miss takes as many calls as its
expert has chunks (`--chunks`), of which each is a read from disk. Each repetition gives one figure
for every policy; the ratio is that of its figures to those of the first policy. `next-use+network`
also computes a network like those of `greenroom train-policy`, with random weights and no effect.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
from common import commit, machine, show_ratio, table

from greenroom.amounts import Amount
from greenroom.core.cost import Costs, Link, Work
from greenroom.core.events import Action, Event
from greenroom.core.policy import Policy, PolicySetup
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.policies import policy
from greenroom.policies.helpers.next_use_network import TRAINED
from greenroom.policies.helpers.next_use_state import NextUseState, build_state
from greenroom.runtime.store.disk import CHUNK_BYTES
from greenroom.sim.event_driven import EventOptions, simulate_events
from greenroom.trace import Trace, load, stream

SPEEDS = Costs((Link(3e9, 1e-4),), Work.constant(1e-4), Work.constant(1e-4))
on = Scheduler.on
POLICIES = ["lru", "next-use:memory=2", "next-use", "next-use+network"]


class Clock:
    """Calls of `Scheduler.on`, timed by the clock of their thread."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def on(self, scheduler: Scheduler, event: Event, now: float = 0.0) -> list[Action]:
        begin = time.thread_time()
        actions = on(scheduler, event, now)
        self.seconds += time.thread_time() - begin
        self.calls += 1
        return actions


def clock_s() -> float:
    """Seconds that the thread's clock adds to what it times."""
    taken = []
    for _ in range(10_000):
        begin = time.thread_time()
        taken.append(time.thread_time() - begin)
    return statistics.median(taken)


def chosen(name: str) -> Policy:
    """The policy of a name; `+network` gives `next-use` a network."""
    name, _, network = name.partition("+")
    found = policy(name)
    return replace(found, build_state=_with_network) if network else found


def _with_network(setup: PolicySetup) -> NextUseState:
    """A state of `next-use` with random weights whose output does not count."""
    state, random = build_state(setup), np.random.default_rng(0)
    for name in TRAINED:
        array = getattr(state.network, name)
        array[...] = 0.1 * random.standard_normal(array.shape)
    for array in (state.network.output, state.network.units, state.network.linear):
        array *= 1e-6
    state.network.constant[:] = 0
    state.network.trained[:] = 1
    return state


def measure(trace: Trace, tokens: int, slots: int, name: str, chunks: int) -> tuple[float, float]:
    """(seconds of a step, misses of a step)."""
    steps, clock = stream(trace, "runtime", tokens), Clock()
    with patch.object(Scheduler, "on", lambda *args: clock.on(*args)):
        run = simulate_events(
            trace.head(tokens), steps, slots, chosen(name), SPEEDS, chunks * CHUNK_BYTES, "off",
            EventOptions(),
        )  # fmt: skip
    count = run.counts.steps
    return (clock.seconds - clock.calls * clock_s()) / count, run.times.misses / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--capacity", nargs="+", default=["20%", "60%"])
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--chunks", type=int, default=1, help="of an expert")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    trace = load(args.trace)
    experts = int(trace.offsets[-1])
    print(f"{args.trace.stem}, {args.tokens} tokens, {machine()}, {commit()}\n")
    rows = []
    for capacity in args.capacity:
        slots = Amount.parse(capacity, "--capacity").of(experts)
        for name in args.policies:  # compiles
            measure(trace, 2, slots, name, args.chunks)
        figures = [
            [measure(trace, args.tokens, slots, name, args.chunks) for name in args.policies]
            for _ in range(args.repeat)
        ]
        for name, own in zip(args.policies, zip(*figures, strict=True), strict=True):
            pairs = [(mine[0], each[0][0]) for mine, each in zip(own, figures, strict=True)]
            middle = statistics.median(seconds for seconds, _ in own)
            rows.append([name, capacity, f"{own[0][1]:.2f}", f"{middle * 1e6:.1f}",
                         show_ratio(pairs)])  # fmt: skip
    print(table(["policy", "capacity", "misses a step", "µs a step", "ratio"], rows))


if __name__ == "__main__":
    main()
