"""Check an eviction policy against the benchmark's rules, measure it, and print its row.

    python benchmarks/policies/check.py POLICY [--traces DIR] [--json FILE] [--rules]

POLICY is a Python file that defines `policy`, or the name of one of Greenroom's; options follow a
colon. The recordings are NAME.npz or NAME.trace in DIR, as recordings.py makes them; each must have
the digest in recordings.json. The rules are checked first, on a synthetic trace and on the first
tokens of each recording. The exit code is 1 if a rule is broken, 2 if something is missing.
docs/benchmark.md explains the rules and the score. Needs numpy and numba; no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from cells import RECORDINGS, SEED, Cell, digest_of, means_of, measure, row_of, score_of
from referee import RuleError, check_rules

import greenroom
from greenroom.config import TopicsConfig
from greenroom.core.policy import Policy
from greenroom.errors import GreenroomError, TraceError
from greenroom.policies import policy
from greenroom.trace import Trace, load
from greenroom.trace.synth import topics

SMALL = TopicsConfig(layers=6, experts=32, top_k=4, tokens=240, requests=6)
HEAD = 200  # tokens of a recording on which rules are checked


def recording(folder: Path, name: str) -> Trace:
    """Load a recording of the benchmark, and check that it is the right one."""
    paths = [folder / f"{name}{suffix}" for suffix in (".npz", ".trace")]
    if (path := next((path for path in paths if path.is_file()), None)) is None:
        raise TraceError(
            f"{paths[0]} is missing: docs/benchmark.md says how to make it (recordings.py), or"
            " check the rules alone with --rules"
        )
    trace = load(path)
    if (digest := digest_of(trace)) != RECORDINGS[name]["sha256"]:
        raise TraceError(
            f"{path} is another recording: its routing has the SHA-256 {digest}, but the"
            f" benchmark's has {RECORDINGS[name]['sha256']}"
        )
    return trace


def rules(chosen: Policy, traces: dict[str, Trace]) -> int:
    """Check the rules, and count the traces; RuleError names the first rule that is broken."""
    heads = {name: trace.head(HEAD) for name, trace in traces.items()}
    for name, trace in {"synthetic": topics(SMALL), **heads}.items():
        print(f"rules: {name}", file=sys.stderr, flush=True)
        check_rules(chosen, trace, SEED)
    return 1 + len(heads)


def cells_of(chosen: Policy, traces: dict[str, Trace], workers: int) -> list[Cell]:
    cells = []
    for name, trace in traces.items():
        for cell in measure(chosen, name, trace, workers):
            cells.append(cell)
            where = f"{name} {cell.percent} % order {cell.order or 'stored'}"
            print(f"{where}: {cell.gap_closed:.1%}", file=sys.stderr, flush=True)
    return cells


def main(args: argparse.Namespace) -> int:
    begin = time.monotonic()
    try:
        chosen = policy(args.policy)
        traces = {} if args.rules else {n: recording(args.traces, n) for n in args.recordings}
        checked = rules(chosen, traces)
        if args.rules:
            print(f"{chosen.name} keeps the rules on {checked} trace")
            return 0
        cells = cells_of(chosen, traces, args.workers)
    except RuleError as error:
        print(f"check: {args.policy} {error}", file=sys.stderr)
        return 1
    except GreenroomError as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    means = means_of(cells)
    print(row_of(chosen.name, means))
    if args.json:
        facts = {
            "policy": chosen.name, "score": score_of(means), "gap_closed": means,
            "greenroom": greenroom.__version__, "seconds": round(time.monotonic() - begin),
            "cells": [cell.as_json() for cell in cells],
        }  # fmt: skip
        args.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("policy", metavar="POLICY")
    parser.add_argument("--traces", type=Path, default=Path("bench-data/recordings"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure")
    parser.add_argument("--rules", action="store_true", help="check the rules without recordings")
    parser.add_argument(
        "--recordings", nargs="+", choices=list(RECORDINGS), default=list(RECORDINGS),
        metavar="NAME", help="a part of the benchmark, which makes no row of its table",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N")
    sys.exit(main(parser.parse_args()))
