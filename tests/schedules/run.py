"""Run schedules of all scenarios, or of some of them, with seeds that no run has had before.

    python -m tests.schedules.run --schedules 20000          # of all scenarios together
    python -m tests.schedules.run --seconds 600 engine steps
    python -m tests.schedules.run engine --seed 17                     # one schedule again
    python -m tests.schedules.run engine --seed 17 --choices 40:1,95:2 # or by a list of choices

The next seed of a scenario is the number of its schedules so far, which the file of tests/counts.py
adds up. Exit code 1 where a schedule failed: its seed and its shortest list of choices are printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from itertools import cycle

from tests import counts
from tests.schedules.runner import Scenario
from tests.schedules.scenarios import SCENARIOS, ready
from tests.schedules.scheduler import Failure
from tests.schedules.strategies import Replay

SAVED_S = 10.0  # after which counts are saved
Choices = tuple[tuple[int, int], ...]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.schedules.run")
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--schedules", type=int, help="number of schedules of all scenarios")
    parser.add_argument("--seconds", type=float, help="or their time")
    parser.add_argument("--seed", type=int, help="run one schedule of each scenario again")
    parser.add_argument("--choices", type=parse_choices, help="in place of the seed's strategy")
    parser.add_argument("--new", action="store_true", help="begin at seed 0, and count nothing")
    options = parser.parse_args(arguments)
    scenarios = [SCENARIOS[name] for name in options.scenarios or SCENARIOS]
    with ready(each.name for each in scenarios):
        if options.seed is not None:
            return max(_repeat(each, options.seed, options.choices) for each in scenarios)
        return _run_many(scenarios, options.schedules, options.seconds, options.new)


def parse_choices(text: str) -> Choices:
    """Read a list of choices, STEP:INDEX,..."""
    pairs = (each.split(":") for each in text.split(",") if each)
    return tuple((int(step), int(index)) for step, index in pairs)


def _repeat(scenario: Scenario, seed: int, choices: Choices | None) -> int:
    try:
        done = scenario.run(seed, None if choices is None else Replay(choices))
    except Failure as failure:
        print(f"{scenario.name}, seed {seed}: {type(failure).__name__}: {failure}")
        return 1
    print(f"{scenario.name}, seed {seed}: {done.step} steps, {len(done.choices)} choices, good")
    return 0


def _run_many(
    scenarios: list[Scenario], schedules: int | None, seconds: float | None, new: bool
) -> int:
    """Run the scenarios in turn, and count their schedules."""
    most = schedules if schedules is not None or seconds is not None else 1000
    until = float("inf") if seconds is None else time.monotonic() + seconds
    totals = {} if new else counts.totals()
    seeds = {each.name: totals.get(_count_name(each.name), 0) for each in scenarios}
    done, steps, failed = Counter[str](), Counter[str](), Counter[str]()
    unsaved, saved_at, begin = Counter[str](), time.monotonic(), time.monotonic()
    for scenario in cycle(scenarios):
        name, now = scenario.name, time.monotonic()
        is_over = now >= until or (most is not None and sum(done.values()) >= most)
        if (is_over or now - saved_at > SAVED_S) and not new:
            counts.add_all({_count_name(each): count for each, count in unsaved.items()})
            unsaved, saved_at = Counter(), now
        if is_over:
            break
        try:
            steps[name] += scenario.run(seeds[name]).step
        except Failure as failure:
            failed[name] += 1
            _report(scenario, seeds[name], failure, first=failed[name] == 1)
        seeds[name] += 1
        done[name] += 1
        unsaved[name] += 1
    for name, count in done.items():
        print(
            f"{name}: {count} schedules, {steps[name] // count} steps each, {failed[name]} failed"
        )
    print(f"{sum(done.values())} schedules in {time.monotonic() - begin:.0f} s,"
          f" {sum(failed.values())} failed; since the first run:"
          f" {sum(counts.totals().get(_count_name(each), 0) for each in SCENARIOS)}")  # fmt: skip
    return 1 if failed else 0


def _count_name(scenario: str) -> str:
    return f"schedules/{scenario}"


def _report(scenario: Scenario, seed: int, failure: Failure, first: bool) -> None:
    """Print a failure, and the shortest schedule that has it, once for each scenario."""
    kind = type(failure).__name__
    command = f"python -m tests.schedules.run {scenario.name} --seed {seed}"
    print(f"{scenario.name}, seed {seed}: {kind}; again: {command}", flush=True)
    if first:
        choices = scenario.shrink(seed, failure.choices)
        listed = ",".join(f"{step}:{index}" for step, index in choices)
        print(f"{failure}\nshortest: {command} --choices '{listed}'", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
