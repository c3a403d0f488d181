"""Run the fuzzers of all formats, or print what earlier runs have tried and reached."""

from __future__ import annotations

import logging
import os
import sys

from tests.counts import add_all, totals
from tests.fuzz import coverage
from tests.fuzz.fuzzer import FORMATS, Fuzzer, share
from tests.fuzz.kept import POOL, Shared

SLICE_S = 1.0  # for a format, until it is another's turn


def run(names: list[str], shared: Shared) -> int:
    """Fuzz formats within the limits that the environment sets; 1 if any input failed."""
    fuzzers = _fuzzers(names, shared)
    inputs = int(os.environ.get("GREENROOM_FUZZ_INPUTS") or 0)
    seconds = float(os.environ.get("GREENROOM_FUZZ_SECONDS") or 60)
    shares = sum(share(each.name) for each in fuzzers)
    for fuzzer in fuzzers if not inputs else ():
        _turn(fuzzer, seconds * share(fuzzer.name) / shares)
    while (left := inputs - sum(each.number for each in fuzzers)) > 0:
        for fuzzer in fuzzers:
            _turn(fuzzer, SLICE_S, -(-left // len(fuzzers)))
    for each in fuzzers:
        all_statements = coverage.statements(each.name)
        print(f"{each.name}: {each.number:,} inputs, {each.failed} failed, {each.reached} of"
              f" {all_statements} statements", flush=True)  # fmt: skip
    number, failed, reached = (
        sum(getattr(each, name) for each in fuzzers) for name in ("number", "failed", "reached")
    )
    print(f"all formats: {number:,} inputs, {failed} failed, {reached:,} statements")
    return 1 if failed else 0


def _turn(fuzzer: Fuzzer, seconds: float, most: int = 1 << 62) -> None:
    """Let a fuzzer run, and count what it has tried: a run that is stopped has counted, too."""
    number, failed = fuzzer.number, fuzzer.failed
    fuzzer.run(seconds, most)
    name = f"fuzz/{fuzzer.name}"
    add_all({f"{name} inputs": fuzzer.number - number, f"{name} failures": fuzzer.failed - failed})


def table(names: list[str], shared: Shared) -> int:
    """Print all runs' inputs by format, and what the pool reaches of the readers' statements."""
    counts, sums = totals(), [0, 0, 0, 0]
    print("| parser | inputs | statements reached | of | failures |\n|---|--:|--:|--:|--:|")
    for fuzzer in _fuzzers(names, shared):
        fuzzer.run(600.0, fuzzer.known)
        name = f"fuzz/{fuzzer.name}"
        row = [counts.get(f"{name} inputs", 0), fuzzer.reached, coverage.statements(fuzzer.name),
               counts.get(f"{name} failures", 0)]  # fmt: skip
        sums = [a + b for a, b in zip(sums, row, strict=True)]
        print(f"| {fuzzer.name} | {' | '.join(f'{each:,}' for each in row)} |")
    print(f"| all | {' | '.join(f'{each:,}' for each in sums)} |")
    return 0


def _fuzzers(names: list[str], shared: Shared) -> list[Fuzzer]:
    os.fsync = lambda descriptor: None  # nobody needs these files after a crash
    logging.disable()
    before, seed = totals(), os.environ.get("GREENROOM_FUZZ_SEED")
    if unknown := set(names) - set(FORMATS):
        sys.exit(f"no such formats: {', '.join(unknown)}; there are {', '.join(FORMATS)}")
    guided = "--blind" not in sys.argv
    return [
        Fuzzer(
            name,
            int(seed or before.get(f"fuzz/{name} inputs", 0)),
            POOL if guided else None,
            each=shared.put,
            guided=guided,
        )
        for name in names or FORMATS
    ]
