"""Accuracy of the planner: planned against measured time of settings it was not fitted to.

    python benchmarks/plan.py bench-data/moe1.7b-zipf1.0 --out plan.jsonl --seconds 50
    python benchmarks/plan.py bench-data/moe1.7b-zipf1.0 --out plan.jsonl --table

Three short runs (`TRAINING`: two of plain LRU, one with a predictor) and a recording of the model's
routing are the plan's input, with the profile of `greenroom doctor`. Then every setting of a
grid of cache sizes, policies, predictors and read limits decodes tokens of other prompts, from a
cache that other tokens have warmed, and its mean time a token is compared with the plan's, and with
the range that the plan gives.

Runs are appended to --out; a call goes on where the last one ended, and ends after --seconds, so
that a machine that has other work can be had for a minute at a time. --table reads them only.
With --choice the grid is small, and each setting is run --rounds times in turns: the plan's choice
is compared with the best that was measured.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common import commit, machine, note, show_ratio, table

from greenroom.cli.estimate.machine import machine_of
from greenroom.cli.terminal.progress import Progress
from greenroom.config import LoadConfig, RecordConfig, SamplingConfig
from greenroom.hf.load.describe import describe
from greenroom.hf.measure.harness import Harness, Measurement
from greenroom.hf.measure.recording import record
from greenroom.plan.costs import RunMeasurement, calibrated_costs, machine_costs, throttled_costs
from greenroom.plan.estimate import Estimate, Estimator
from greenroom.plan.model import Model
from greenroom.plan.planner import choose_setting
from greenroom.plan.settings import DEFAULT, PLAIN, Setting
from greenroom.plan.workload import recorded_workload
from greenroom.runtime.store.throttle import Throttle
from greenroom.trace import load
from greenroom.trace.prompts import Prompt

PROMPT_LENGTH, TOKENS, SETTLE = 6, 28, 8  # SETTLE: tokens of the answer not counted
OFF, AHEAD = "off", "next-gate"


@dataclass(frozen=True)
class Case:
    """A setting and a size behind a link of at most `limit` bytes a second."""

    share: float
    policy: str
    scope: str
    prefetch: str
    limit: float | None = None

    @property
    def setting(self) -> Setting:
        return Setting(self.policy, self.scope, self.prefetch)


TRAINING = (
    Case(0.25, "lru", "shared", OFF),
    Case(0.5, "lru", "shared", OFF),
    Case(0.25, "next-use", "shared", AHEAD, 500e6),
)


def unseen(limits: list[float]) -> list[Case]:
    """The settings of the grid that the plan has not seen: those outside of TRAINING."""
    shares = (0.125, 0.25, 0.5)
    cases = [
        Case(share, policy, "shared", OFF, limit)
        for limit in (None, *limits)
        for share in shares
        for policy in ("lru", "next-use")
    ]
    cases += [Case(share, "lcp", "per-layer", OFF, limits[0]) for share in shares]
    cases += [
        Case(share, "next-use", "shared", AHEAD, limit) for limit in limits for share in shares[1:]
    ]
    return [case for case in cases if case not in TRAINING]


def small(share: float, limit: float | None) -> list[Case]:
    """Settings of one size, with which the plan's choice is compared."""
    settings = [PLAIN, DEFAULT, replace(DEFAULT, prefetch=OFF), replace(PLAIN, prefetch="auto"),
                Setting("lcp", "shared", OFF), Setting("next-use", "per-layer", OFF)]  # fmt: skip
    return [Case(share, s.policy, s.scope, s.prefetch, limit) for s in settings]


def prompts_of(stage: Harness, count: int, seed: int) -> list[Prompt]:
    """Random words of the model's vocabulary."""
    vocabulary, draw = sorted(stage.tokenizer.get_vocab()), random.Random(seed)
    texts = (" ".join(draw.choices(vocabulary, k=PROMPT_LENGTH)) for _ in range(count))
    return [Prompt(text, "random") for text in texts]


def measured(stage: Harness, case: Case, number: int) -> dict[str, Any]:
    """Measure one run: warmed without a limit, then counted behind the limit."""
    stage.setup = replace(stage.setup, read_limit=int(case.limit) if case.limit else None)
    config = LoadConfig(policy=case.policy, scope=case.scope, prefetch=case.prefetch,
                        no_guard=case.prefetch != "auto")  # fmt: skip
    stage.attach(config, int(case.share * stage.experts))
    if case.limit:
        throttle_of(stage).bandwidth = math.inf
    first, second = prompts_of(stage, 2, number)
    stage.play([first], TOKENS, raw=True)
    if case.limit:
        throttle_of(stage).bandwidth = case.limit
    done = stage.play([second], TOKENS, SETTLE, raw=True)
    stage.learn()
    return {**asdict(case), "number": number, **_row(done, stage)}


def throttle_of(stage: Harness) -> Throttle:
    """The throttle of a store with a read limit (not part of its interface)."""
    store: Any = stage.model.greenroom.driver._copier._store
    throttle: Throttle = store.throttle
    return throttle


def _row(done: Measurement, stage: Harness) -> dict[str, Any]:
    tokens = len(done.gaps)
    size = stage.setup.catalog.all_experts_bytes // stage.experts
    measurement = RunMeasurement(
        done.tpot_s, done.stall_s / tokens, done.bytes_read / size / tokens, done.bytes_read,
        done.busy_s, stage.model.greenroom.setup.prefetch != OFF,
    )  # fmt: skip
    return {"observed": asdict(measurement), "miss_ratio": done.miss_ratio, "at": time.time()}


def measure(args: argparse.Namespace, cases: list[Case]) -> None:
    """Measure the cases that --out does not have yet, until the time is over."""
    end = time.perf_counter() + args.seconds
    done = [(_case(row), row["number"]) for row in rows_of(args.out)]
    cases_in_turn = [(case, n) for n in range(args.rounds) for case in [*TRAINING, *cases]]
    cases_in_turn = [each for each in dict.fromkeys(cases_in_turn) if each not in done]
    if not cases_in_turn:
        return
    stage = Harness(str(args.model), LoadConfig(cache="100%", prefetch=OFF, context=1024))
    try:
        if not args.trace.exists():
            _record(stage, args)
        for case, number in cases_in_turn:
            if time.perf_counter() > end:
                break
            row = measured(stage, case, number)
            note(f"{case}: {row['observed']['seconds'] * 1e3:.1f} ms")
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    finally:
        stage.close()


def _record(stage: Harness, args: argparse.Namespace) -> None:
    """The model's routing, with everything resident."""
    record(
        stage.model, stage.tokenizer, prompts_of(stage, 6, 1000), args.trace,
        sampling=SamplingConfig(max_new_tokens=56, temperature=1.0, seed=0),
        recording=RecordConfig(predict=AHEAD, raw=True), name=str(args.model),
    )  # fmt: skip


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _case(row: dict[str, Any]) -> Case:
    return Case(**{name: row[name] for name in Case.__dataclass_fields__})


class Planner:
    """Estimates from the planner's inputs: the profile, the recording, the runs of TRAINING."""

    def __init__(self, model: Model, args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
        profile, this_machine = machine_of(args.machine, Progress())
        training_rows = [row for row in rows if _case(row) in TRAINING]
        runs = [
            replace(
                RunMeasurement.from_json(row["observed"]),
                predicted=row["prefetch"] != OFF,
                carried=0.0 if row["limit"] else row["observed"]["carried"],  # not the disk's rate
            )
            for row in training_rows
            if not args.profile_only
        ]
        self.model, self.measured = model, bool(runs)
        self.costs = calibrated_costs(machine_costs(profile, model), model, runs)
        trace = load(args.trace)
        trace = trace.select(range(min(args.requests or trace.requests, trace.requests)))
        self.workload = recorded_workload(trace, model, str(args.trace))
        self._by_limit: dict[float | None, Estimator] = {}
        print(f"profile of {'this' if this_machine else 'another'} machine; {len(runs)} runs seen")

    def estimator(self, limit: float | None) -> Estimator:
        if limit not in self._by_limit:
            costs = throttled_costs(self.costs, limit, self.model.expert_bytes)
            own_estimator = Estimator(self.model, costs, self.workload, measured=self.measured)
            self._by_limit[limit] = own_estimator
        return self._by_limit[limit]

    def of(self, case: Case) -> Estimate:
        return self.estimator(case.limit).of(case.setting, int(case.share * self.model.experts))


def report(planner: Planner, rows: list[dict[str, Any]]) -> str:
    """A table with a line for each setting, then median error and coverage of ranges."""
    times = defaultdict(list)
    for row in rows:
        if (case := _case(row)) not in TRAINING:
            times[case].append(row["observed"]["seconds"])
    lines, errors, inside = [], [], []
    for case, seconds in times.items():
        prediction, took = planner.of(case), statistics.median(seconds)
        errors.append(prediction.tpot / took - 1)
        inside.append(prediction.low <= took <= prediction.high)
        link = "disk" if case.limit is None else f"{case.limit / 1e6:.0f} MB/s"
        lines.append((
            f"{case.share:.1%}, {link}", f"{case.policy}, {case.scope}", case.prefetch,
            f"{took * 1e3:.1f}", f"{prediction.tpot * 1e3:.1f}", f"{errors[-1]:+.1%}",
            f"{prediction.low * 1e3:.0f} to {prediction.high * 1e3:.0f}",
            "in" if inside[-1] else "out",
        ))  # fmt: skip
    header = ("size", "policy", "prefetch", "measured ms", "planned ms", "error", "range", "")
    off = sorted(abs(error) for error in errors)
    return (
        f"{table(header, lines)}\n\n{len(errors)} settings: median error"
        f" {statistics.median(off):.1%}, nine in ten within {off[int(0.9 * (len(off) - 1))]:.1%};"
        f" {sum(inside)} of {len(inside)} inside the printed range of"
        f" +-{planner.estimator(None).band:.0%}"
    )


def compare(planner: Planner, rows: list[dict[str, Any]], cases: list[Case]) -> str:
    """A table of the plan's choice and the best measured setting, paired by round."""
    times: dict[Case, dict[int, float]] = defaultdict(dict)
    for row in rows:
        times[_case(row)][row["number"]] = row["observed"]["seconds"]
    cases = [case for case in cases if times[case]]
    predictions = {case: planner.of(case) for case in cases}
    compared = tuple(sorted(predictions.values(), key=lambda each: each.tpot))
    best, sure = choose_setting(planner.estimator(cases[0].limit), compared)
    chosen = next(case for case in cases if predictions[case] is best)
    fastest = min(cases, key=lambda case: statistics.fmean(times[case].values()))
    lines = [
        (case.setting.flags(), f"{statistics.fmean(times[case].values()) * 1e3:.1f}",
         f"{predictions[case].tpot * 1e3:.1f}",
         show_ratio([(times[case][n], times[fastest][n]) for n in times[case]
                     if n in times[fastest]]),
         "chosen" if case == chosen else "")
        for case in cases
    ]  # fmt: skip
    header = ("settings", "measured ms", "planned ms", "of the fastest", "")
    return f"{table(header, lines)}\n\n{'surely another than' if sure else 'the'} default"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", type=Path)
    add("--out", type=Path, required=True, help="runs, as JSON lines; those in it are not repeated")
    add(
        "--trace", type=Path, help="the model's routing; recorded if absent (default: beside --out)"
    )
    add("--requests", type=int, metavar="N", help="of the recording that are simulated (default:"
        " all): what a policy has learned by then should be what it learns in a run")  # fmt: skip
    add("--machine", default="auto", help="its profile (default: this machine's)")
    add("--seconds", type=float, default=math.inf, help="begin no further run after these")
    add("--limits", type=float, nargs="+", default=[500e6, 250e6], metavar="BYTES/S")
    add("--rounds", type=int, default=1, help="runs of each setting")
    add("--choice", type=float, metavar="SHARE", help="the small grid, at this size")
    add("--profile-only", action="store_true", help="do not go by the runs that were seen")
    add("--table", action="store_true", help="measure nothing")
    args = parser.parse_args()
    args.trace = args.trace or args.out.with_suffix(".safetensors")
    limit = args.limits[0] if args.choice else None
    cases = unseen(args.limits) if args.choice is None else small(args.choice, limit)
    print(f"commit {commit()}; {machine()}")
    if not args.table:
        return measure(args, cases)
    rows = rows_of(args.out)
    planner = Planner(describe(str(args.model), LoadConfig()), args, rows)
    print(report(planner, rows) if args.choice is None else compare(planner, rows, cases))
    return None


if __name__ == "__main__":
    main()
