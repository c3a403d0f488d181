"""Decode with and without prefetching, at set ratios of transfer to compute time.

    python benchmarks/replay/speed.py bench-data/olmoe-8 olmoe-1b-7b.npz --out speed.jsonl
    python benchmarks/replay/speed.py --report speed.jsonl      # the table once more
    python benchmarks/replay/speed.py ... --ratios --bandwidths 2 --shares 0.1 0.2 0.3 0.5 0.7
    python benchmarks/replay/speed.py ... --batch 8 --shares 0.25 --ratios 1

The model has a real model's shapes and a recording's routing (forced.py); its experts are in
memory behind a throttled link, whose bandwidth makes the ratio

    (bytes that the reactive run misses a token / bandwidth) / (a token with everything resident)

equal to the cell's, or on the disk (its bandwidth is measured at the start), or behind a link of a
set bandwidth. Bytes come from the replay of the same requests by the same policy at the same
capacity; the time of a token is measured at the start. With --batch so many requests are decoded
together, and a token is a pass of one of each.

A run is a session: some requests fill an empty cache with nothing computed, then one request is
decoded token by token; its first passes (--settle) are not counted. Variants of a cell follow one
another, in an order that turns with each repetition, over the same tokens: `x reactive` is over
pairs of the same pass (blocks of 4 passes are resampled for the interval). One thread computes, so
that the link's copies have a core of their own: link.py measures their remaining cost.

Further columns: `floor`, the longer of computing and transfers, a lower bound; the hidden share of
the reactive stall that can be hidden; and the share of the best oracle's gain.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from forced import batched
from rig import Rig, arguments, cut, forced

from common import commit, machine, note, ratio, table  # isort: skip
from greenroom.policies import choose
from greenroom.sim.replay import replay
from greenroom.trace import Trace
from greenroom.trace.orders import stream

BLOCK = 4  # passes that are one pair
REACTIVE = "reactive"
USUAL = [REACTIVE, "markov", "noisy-oracle:2", "oracle:2"]


@dataclass(frozen=True)
class Cell:
    """A share of resident experts, and the speed of the link.

    The speed is a ratio of transfer to compute, or GB/s; without both, experts come from the disk.
    """

    share: float
    ratio: float | None
    line: float | None = None


@dataclass(frozen=True)
class Session:
    """Requests of one repetition: all but the last fill the cache.

    `first` is the number of the first counted pass.
    """

    trace: Trace
    filling: int  # tokens
    first: int

    @property
    def settling(self) -> range:
        """Passes that are computed and not counted."""
        return range(int(np.searchsorted(self.trace.pass_starts, self.filling)), self.first)

    @property
    def counted(self) -> range:
        return range(self.first, self.trace.passes)


def sessions(
    trace: Trace, tokens: int, fill: int, settle: int, repeats: int, batch: int = 1
) -> list[Session]:
    """Sessions of neighbouring requests, from `repeats` places of the recording."""
    short = batched(cut(trace, tokens), batch)
    places = np.linspace(0, short.requests - fill - 1, repeats + 1).astype(int)[:-1].tolist()
    chosen = [short.select(range(place, place + fill + 1)) for place in places]
    return [Session(trace, fill * tokens * batch, fill * tokens + settle) for trace in chosen]


def misses(session: Session, capacity: int, policy: str) -> int:
    """Misses of the counted passes in a simulated replay."""
    requests, experts = stream(session.trace, "runtime"), int(session.trace.offsets[-1])
    replayed = replay(
        requests, session.trace.offsets, capacity, choose(policy, capacity, experts), detail=True
    )
    assert replayed.missed is not None
    a_pass = np.repeat(requests.token, np.diff(requests.starts))
    return int(replayed.missed[a_pass >= session.first].sum())


def run(rig: Rig, session: Session, capacity: int, bandwidth: float | None, args: Any,
        variant: str) -> dict[str, Any]:  # fmt: skip
    """Play a session with one variant; return seconds of each counted pass and the counters."""
    cache = rig.attach(
        capacity, policy=args.policy, bandwidth=bandwidth, guard=args.guard,
        prefetch="off" if variant == REACTIVE else variant, session=session.trace,
    )  # fmt: skip
    rig.warm(session.trace.head(session.filling))
    with forced(rig.model, session.trace) as routing:
        routing.play(session.settling)
        cache.reset_stats()
        seconds = routing.play(session.counted)
    stats = cache.stats()
    return {
        "seconds": seconds,
        "requests": stats.expert_requests,
        "misses": stats.expert_requests - stats.expert_hits,
        "bytes": stats.bytes_read,
        "stall_s": stats.stall_s,
    }


def measure(rig: Rig, args: Any) -> Iterator[dict[str, Any]]:
    """Every run, one record each."""
    layers = len(rig.catalog.layers)
    resident_s, of_experts, _ = rig.resident(batch=args.batch)
    note(
        f"a token with everything resident: {resident_s * 1e3:.0f} ms,"
        f" {of_experts / resident_s:.0%} experts"
    )
    disk = rig.disk() if None in args.ratios else None
    chosen = sessions(rig.trace, args.tokens, args.fill, args.settle, args.repeats, args.batch)
    passes = sum(len(session.counted) for session in chosen)
    for share in args.shares:
        capacity = int(rig.catalog.experts * share)
        expected = [misses(session, capacity, args.policy) for session in chosen]
        missed = sum(expected) * rig.expert_bytes / passes
        cells = [Cell(share, each) for each in args.ratios]
        for cell in cells + [Cell(share, None, each) for each in args.bandwidths]:
            bandwidth = None if cell.line is None else cell.line * 1e9
            if cell.ratio is not None:
                bandwidth = missed / (cell.ratio * resident_s)
            for repeat, session in enumerate(chosen):
                turn = repeat % len(args.variants)
                for variant in args.variants[turn:] + args.variants[:turn]:
                    begin = time.perf_counter()
                    record = {
                        **asdict(cell), "batch": args.batch,
                        "variant": variant, "repeat": repeat, "layers": layers,
                        "kernels": args.kernels, "threads": args.threads, "policy": args.policy,
                        "capacity": capacity, "bandwidth": bandwidth or disk, "alone_s": resident_s,
                        "expected_misses": expected[repeat], "load": os.getloadavg()[0],
                        **run(rig, session, capacity, bandwidth, args, variant),
                    }  # fmt: skip
                    note(
                        f"{share:.1%} resident, {name_of(cell)}, {variant}:"
                        f" {statistics.median(record['seconds']) * 1e3:.0f} ms a token"
                        f" ({time.perf_counter() - begin:.1f} s)"
                    )
                    yield record


def name_of(cell: Cell) -> str:
    if cell.line is not None:
        return f"{cell.line:g} GB/s"
    return "disk" if cell.ratio is None else f"ratio {cell.ratio:g}"


def blocks(seconds: list[float]) -> list[float]:
    """Sums over blocks of passes."""
    return [sum(seconds[i : i + BLOCK]) for i in range(0, len(seconds), BLOCK)]


Runs = list[dict[str, Any]]


def per_token(runs: Runs, what: str) -> float:
    """A counter's mean over all counted passes."""
    return sum(r[what] for r in runs) / sum(len(r["seconds"]) for r in runs)


def tpot(runs: Runs) -> float:
    """Seconds a token: mean over all counted passes, since misses come in bursts."""
    return statistics.fmean(second for r in runs for second in r["seconds"])


def report(records: Runs) -> str:
    """The table: a row for each variant of each cell."""
    cells: dict[Cell, dict[str, Runs]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        cells[Cell(record["share"], record["ratio"], record.get("line"))][record["variant"]].append(
            record
        )
    rows = []
    for cell, variants in cells.items():
        for variant, runs in variants.items():
            rows.append((f"{cell.share:.1%}, {name_of(cell)}", variant,
                         *row(variants, variant, runs)))  # fmt: skip
    header = (
        "resident, transfer / compute", "variant", "TPOT ms", "p50", "p95", "stall ms", "MB moved",
        "misses", "computing ms", "carrying ms", "floor ms", "x reactive", "of the oracle's gain",
        "hidden",
    )  # fmt: skip
    return table(header, rows)


def best_of(variants: dict[str, Runs]) -> Runs | None:
    """The fastest of the oracles."""
    oracles = [runs for name, runs in variants.items() if name.partition(":")[0] == "oracle"]
    return min(oracles, key=tpot, default=None)


def share_hidden(reactive: Runs, runs: Runs, carrying: float) -> str:
    """Share of the reactive stall that a variant hides, of what can be hidden.

    Transfers longer than the variant's computation cause a stall in any case.
    """
    before, after = per_token(reactive, "stall_s"), per_token(runs, "stall_s")
    hideable = before - max(0.0, carrying - (tpot(runs) - after))
    return f"{(before - after) / hideable:.0%}" if hideable > 0 else "-"


def row(variants: dict[str, Runs], variant: str, runs: Runs) -> list[str]:
    """The figures of a variant of a cell."""
    reactive, oracle = variants.get(REACTIVE), best_of(variants)
    first = (reactive or runs)[0]
    resident_s, bandwidth = first["alone_s"], first["bandwidth"]
    missed = per_token(reactive, "bytes") if reactive else None
    carrying = missed / bandwidth if missed is not None else None
    floor = max(resident_s, carrying) if carrying is not None else None
    faster = gain = hidden = "-"
    if reactive and variant != REACTIVE:
        pairs = []
        for a, b in zip(reactive, runs, strict=False):
            pairs += list(zip(blocks(a["seconds"]), blocks(b["seconds"]), strict=True))
        middle, low, high = ratio(pairs)
        faster = f"{middle:.3f} ({low:.3f} to {high:.3f})"
        if oracle and (most := tpot(reactive) - tpot(oracle)) > 0:
            gain = f"{(tpot(reactive) - tpot(runs)) / most:.0%}"
        if carrying is not None:
            hidden = share_hidden(reactive, runs, carrying)
    p50, p95 = np.percentile([s for r in runs for s in r["seconds"]], (50, 95)) * 1e3
    off = sum(r["misses"] != r["expected_misses"] for r in runs) if variant == REACTIVE else 0
    show = [None if x is None else f"{x * 1e3:.0f}" for x in (resident_s, carrying, floor)]
    return [
        *(f"{ms:.0f}" for ms in (tpot(runs) * 1e3, p50, p95, per_token(runs, "stall_s") * 1e3)),
        f"{per_token(runs, 'bytes') / 1e6:.0f}",
        f"{per_token(runs, 'misses') / per_token(runs, 'requests'):.1%}"
        + (" (NOT AS REPLAYED)" if off else ""),
        *(x or "-" for x in show), faster, gain, hidden,
    ]  # fmt: skip


def ratio_of(text: str) -> float | None:
    return None if text == "disk" else float(text)


def main() -> None:
    if "--report" in sys.argv:
        path = Path(sys.argv[sys.argv.index("--report") + 1])
        print(report([json.loads(line) for line in path.read_text().splitlines()]))
        return
    parser = arguments(__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shares", type=float, nargs="+", default=[0.125, 0.25, 0.5])
    add("--ratios", type=ratio_of, nargs="*", default=[0.5, 1.0, 2.0, None],
        help="transfer / compute, or disk")  # fmt: skip
    add("--bandwidths", type=float, nargs="*", default=[], metavar="GB/s", help="of a line")
    add("--batch", type=int, default=1, help="requests decoded together (default: %(default)s)")
    add("--variants", nargs="+", default=USUAL, metavar="NAME",
        help=f"{REACTIVE}, and what --prefetch takes (default: {' '.join(USUAL)})")  # fmt: skip
    add("--guard", action="store_true", help="with the guard, as it is by default in a run")
    add("--tokens", type=int, default=20, help="of a request (default: %(default)s)")
    add("--settle", type=int, default=4, help="of them not counted (default: %(default)s)")
    add("--fill", type=int, default=2, help="requests before (default: %(default)s)")
    add("--repeats", type=int, default=2, help="sessions (default: %(default)s)")
    args = parser.parse_args()
    rig = Rig(args.model, args.trace, kernels=args.kernels, threads=args.threads)
    print(f"commit {commit()}; {machine()}", flush=True)
    print(f"kernels {args.kernels}, threads {args.threads}, policy {args.policy}\n")
    records = []
    for record in measure(rig, args):
        records.append(record)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
    print(report(records))


if __name__ == "__main__":
    main()
