"""Measure unsplit experts, split experts and budgets of layers, on disk or a throttled link.

    greenroom pack bench-data/moe1.7b-zipf1.0 -o bench-data/packs/zipf1.0-s8 --experts same \\
        --segments 8
    python benchmarks/replay/segments.py bench-data/packs/zipf1.0-s8 olmoe-1b-7b.npz \\
        --out segments.jsonl --seconds 50
    python benchmarks/replay/segments.py ... --out segments.jsonl --table

The pack has the recording's shape (16 layers of 64 experts, top-8), and routes as the recording
says (forced.py). Experts are read from the disk through the throttle of a cell, whose bandwidth
makes

    (bytes of unsplit experts missed a token / bandwidth) / (a token with everything resident)

equal to each of --ratios; `disk` sets no throttle. All ways have the same memory and the same
predictor (a noisy oracle; --prefetch off for none):

    whole    whole experts, one pool
    budgets  whole experts, each layer's slots by marginal gain
    split    equal layers, each cut where MoEpic's equations 9 to 11 say
    half     one pool, every expert cut in the middle
    all      budgets and ratios by Algorithm 1

They are computed from other requests of the recording. A run is a session as in speed.py; runs
are appended to --out, ways of a cell in an order that turns with each repetition. A call resumes
where the last one ended, and ends after --seconds. Ratios are over pairs of the same pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rig import ANY, INFINITE, LESSONS, Placed, cut, experts_s, forced, prepared
from speed import BLOCK, Session, misses, sessions

from common import commit, machine, note, show_ratio, table  # isort: skip
import greenroom
from greenroom.config import LoadConfig
from greenroom.core.cache.cache import compile_for
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.load.load import load_with
from greenroom.hf.memory.split import split_experts
from greenroom.plan.budgets import miss_tables, optimal_slots
from greenroom.plan.configurator import TokenLatency, configure, expert_split, layer_statistics
from greenroom.plan.sizing import predicted_activity
from greenroom.policies import policy
from greenroom.predictors import OFF
from greenroom.runtime.fakes import FakeStore
from greenroom.runtime.store.disk import DiskStore
from greenroom.sim.event_driven import passes
from greenroom.sim.foresight import foresight_of
from greenroom.trace import load
from greenroom.trace.orders import stream

WAYS = ("whole", "budgets", "split", "half", "all")
DISK = "disk"


@dataclass(frozen=True)
class Cell:
    """One run: a share of experts, a ratio of transfer to compute, a way, a repetition."""

    share: float
    ratio: float
    way: str
    number: int

    @property
    def key(self) -> str:
        return f"{self.share}/{self.ratio}/{self.way}/{self.number}"


class LoadedPack:
    """A pack, loaded once, and the recording; `attach` gives the pack another cache."""

    def __init__(self, args: Any) -> None:
        self.args = args
        config = LoadConfig(cache=1 << 26, context=1024, prefetch="off", threads=args.threads)
        self.model: Any = load_with(str(args.pack), config, remember=False)[0]
        self.setup = replace(self.model.greenroom.setup, fingerprint="", guard=False)
        self.catalog = self.setup.catalog
        layers = len(self.catalog.layers)
        recording = prepared(load(args.trace), layers, self.model.config.vocab_size)
        self.trace = recording.select(range(recording.requests - LESSONS))
        self.lessons = cut(
            recording.select(range(recording.requests - LESSONS, recording.requests)), 64
        )
        self.expert_bytes = self.catalog.all_experts_bytes // self.catalog.experts

    def attach(
        self, capacity: int, way: dict[str, Any], bandwidth: float, session: Session | None = None
    ) -> tuple[Greenroom, FakeStore]:
        """Attach a new, empty cache of this way behind a throttle; `session` will be played."""
        self.model.greenroom.detach()
        catalog, cut_at = self.catalog, None
        if "split" in way:
            catalog, cut_at = split_experts(catalog, way["split"], self.trace.top_k)
        chosen = policy(self.args.policy)
        compile_for(chosen)
        ahead = session is not None and self.args.prefetch != OFF
        parts = replace(
            self.setup, catalog=catalog, split=cut_at, scope=way.get("scope", "shared"),
            capacity=capacity, policy=chosen.name, prefetch=ANY if ahead else OFF,
        )  # fmt: skip
        store = FakeStore(DiskStore(catalog), bandwidth=bandwidth)
        attached = self.model.greenroom = Greenroom(self.model, parts, store)
        if attached.driver.predictions.foresight is not None:
            assert session is not None
            predictor = foresight_of(session.trace, self.args.prefetch).predictor
            attached.driver.predictions.foresight = Placed(predictor, catalog.offsets)
        return attached, store

    def warm(self, attached: Greenroom, session: Session) -> None:
        """Serve the passes before the counted ones from the cache, without computing."""
        trace, offsets = session.trace.head(session.filling), self.catalog.offsets
        for at, steps in passes(trace, stream(trace, "runtime")):
            attached.driver.begin_pass(at._replace(request=at.request - trace.requests - 1))
            for step in steps:
                first = offsets[step.layer]
                attached.driver.step(
                    step.layer, step.experts - first, lambda *_: None, step.rows, step.weights
                )
            attached.driver.end_pass()

    @cached_property
    def resident(self) -> tuple[float, float]:
        """Seconds of a token with everything resident, and those of its experts."""
        attached, _ = self.attach(self.catalog.experts - 1, {}, INFINITE)
        for layer, (a, b) in enumerate(pairwise(self.catalog.offsets)):
            attached.driver.step(layer, np.arange(b - a), lambda *_: None)
        short = cut(self.trace, 20).select([0])
        with forced(self.model, short) as routing:
            routing.play(range(4))
            return experts_s(attached, routing, range(4, 20))[:2]

    def ways(self, capacity: int, bandwidth: float) -> dict[str, dict[str, Any]]:
        """Every compared way of the cache at this size and bandwidth."""
        token, experts = self.resident
        layers, n = (
            layer_statistics(predicted_activity(self.lessons, self.args.prefetch)),
            self.trace.layers,
        )
        latency = TokenLatency(
            (token - experts) / n, experts / n, 0.0, self.expert_bytes / bandwidth
        )
        equal = expert_split(layers, [capacity / n] * n, latency)
        chosen = configure(layers, float(capacity), latency)
        tables = miss_tables(stream(self.lessons, "runtime"), self.lessons.offsets)
        return {
            "whole": {},
            "budgets": {"scope": tuple(map(float, optimal_slots(tables, capacity)))},
            "split": {"scope": "per-layer", "split": tuple(c.ratio for c in equal)},
            "half": {"split": 0.5},
            "all": {
                "scope": tuple(c.budget for c in chosen), "split": tuple(c.ratio for c in chosen),
            },
        }  # fmt: skip

    def run(self, cell: Cell, session: Session, bandwidth: float, disk: float) -> dict[str, Any]:
        """Play a session in one way; return seconds of each counted pass and their counters."""
        capacity = int(self.catalog.experts * cell.share)
        way = self.ways(capacity, min(bandwidth, disk))[cell.way]
        attached, store = self.attach(capacity, way, INFINITE, session)
        self.warm(attached, session)
        store.throttle.bandwidth = bandwidth
        with forced(self.model, session.trace) as routing:
            routing.play(session.settling)
            attached.reset_stats()
            seconds = routing.play(session.counted)
        stats = attached.stats()
        thetas = np.atleast_1d(way.get("split", 1.0))
        return {
            "key": cell.key, "share": cell.share, "ratio": cell.ratio, "way": cell.way,
            "bandwidth": min(bandwidth, disk), "seconds": seconds, "stall_s": stats.stall_s,
            "bytes": stats.bytes_read, "hit_ratio": stats.hit_ratio,
            "theta": [float(thetas.min()), float(thetas.max())],
        }  # fmt: skip


def cells(args: Any) -> Iterator[Cell]:
    """All runs, each way in turn; the order turns with the repetition."""
    for number in range(args.repeats):
        for share in args.shares:
            for ratio in args.ratios:
                turn = number % len(args.ways)
                for way in args.ways[turn:] + args.ways[:turn]:
                    yield Cell(share, ratio, way, number)


def measure(args: Any, known_records: dict[str, Any]) -> None:
    """Run the cells that have no record yet, until the time is over."""
    until = time.monotonic() + args.seconds
    todo = [cell for cell in cells(args) if cell.key not in known_records]
    if not todo:
        return
    pack = LoadedPack(args)
    if "resident" not in known_records:
        note(f"a token with everything resident: {pack.resident[0] * 1e3:.1f} ms")
        files = [Path(file) for file in pack.catalog.files]
        disk = greenroom.runtime.measure.bandwidth.disk_bandwidth(
            files, 4 << 20, 2, True, seconds=3
        )
        save(args, {"key": "resident", "seconds": pack.resident, "disk": disk})
        known_records |= read(args)
    pack.__dict__["resident"] = tuple(known_records["resident"]["seconds"])
    disk = known_records["resident"]["disk"]
    chosen = sessions(pack.trace, args.tokens, args.fill, args.settle, args.repeats)
    for cell in todo:
        if time.monotonic() > until:
            break
        session, bandwidth = chosen[cell.number], INFINITE
        if cell.ratio:
            capacity = int(pack.catalog.experts * cell.share)
            missed = misses(session, capacity, args.policy) / len(session.counted)
            bandwidth = missed * pack.expert_bytes / (cell.ratio * pack.resident[0])
        record = pack.run(cell, session, bandwidth, disk)
        note(f"{cell.key}: {statistics.fmean(record['seconds']) * 1e3:.1f} ms")
        save(args, record)
    pack.model.greenroom.detach()


def save(args: Any, record: dict[str, Any]) -> None:
    with args.out.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read(args: Any) -> dict[str, Any]:
    """Read all records of the output file, by their keys."""
    if not args.out.exists():
        return {}
    records = map(json.loads, args.out.read_text().splitlines())
    return {record["key"]: record for record in records}


def report(known_records: dict[str, Any]) -> str:
    """A table of every way's mean time a token, and its ratio to unsplit experts."""
    by_cell: dict[Any, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for key, record in known_records.items():
        if key != "resident":
            by_cell[record["share"], record["ratio"]][record["way"]].append(record)
    rows = []
    for (share, ratio), ways in sorted(by_cell.items()):
        by_number = {way: {r["key"].split("/")[-1]: r for r in runs} for way, runs in ways.items()}
        unsplit_runs = by_number.get("whole", {})
        line = [f"{share:.1%}", f"{ratio:g}" if ratio else DISK]
        for way in WAYS:
            pairs = [
                pair
                for number, run in by_number.get(way, {}).items()
                if number in unsplit_runs
                for pair in zip(
                    *(blocks(r["seconds"]) for r in (run, unsplit_runs[number])), strict=True
                )
            ]
            mean = [s for run in by_number.get(way, {}).values() for s in run["seconds"]]
            shown = f"{statistics.fmean(mean) * 1e3:.0f}" if mean else "-"
            line.append(shown if way == "whole" or not pairs else f"{shown}, {show_ratio(pairs)}")
        thetas = [t for run in ways.get("all", []) for t in run["theta"]]
        rows.append([*line, f"{min(thetas):.2f}-{max(thetas):.2f}" if thetas else "-"])
    return table(["resident", "ratio", *WAYS, "theta"], rows)


def blocks(seconds: list[float]) -> list[float]:
    return [sum(seconds[i : i + BLOCK]) for i in range(0, len(seconds) - BLOCK + 1, BLOCK)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("pack", type=Path, help="made with --segments")
    add("trace", type=Path, help="a unsplit_runs of as many layers and experts")
    add("--out", type=Path, required=True)
    add("--seconds", type=float, default=3600.0, help="begin no further run after this long")
    add("--table", action="store_true", help="read --out only")
    add("--shares", type=float, nargs="+", default=[0.125, 0.25, 0.5])
    add("--ratios", type=float, nargs="+", default=[0.0, 0.5, 1.0, 2.0], help="0 is the disk")
    add("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    add("--prefetch", default="noisy-oracle:accuracy=0.8")
    add("--policy", default="lru")
    add("--tokens", type=int, default=24)
    add("--settle", type=int, default=4)
    add("--fill", type=int, default=2)
    add("--repeats", type=int, default=3)
    add("--threads", type=int, default=1)
    args = parser.parse_args()
    if not args.table:
        measure(args, read(args))
    print(f"commit {commit()}; {machine()}; prefetch {args.prefetch}, policy {args.policy}\n")
    print("TPOT in ms, and times that of whole experts (95 % interval)\n")
    print(report(read(args)))


if __name__ == "__main__":
    main()
