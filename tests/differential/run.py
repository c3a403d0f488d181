"""Compare two ways to the same result on random inputs, for a time or a number of rounds.

    python -m tests.differential.run --seconds 600
    python -m tests.differential.run gguf --rounds 40

Seeds go on where the last run ended; counts add up in the file of tests/counts.py. Exit code 1 at
the first difference, with the seed that shows it (`--seed`).
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from itertools import count

from tests import conftest  # noqa: F401  the settings of all tests
from tests.counts import add_all, totals
from tests.differential.comparisons import COMPARISONS


def run(name: str, seconds: float, rounds: int, seed: int | None) -> int:
    """Compare until a bound is reached; the number of rounds. AssertionError at a difference."""
    key = f"differential/{name} rounds"
    first = totals().get(key, 0) if seed is None else seed
    until = time.monotonic() + seconds
    for done in count():
        if done == rounds or time.monotonic() > until:
            return done
        try:
            found = COMPARISONS[name](first + done)
        except AssertionError:
            print(f"{name}, --seed {first + done}:", flush=True)
            raise
        if seed is None:
            add_all({**found, key: 1})
    raise AssertionError  # for mypy


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(COMPARISONS))
    parser.add_argument("--seconds", type=float, default=60.0, help="for all comparisons together")
    parser.add_argument("--rounds", type=int, default=-1, help="of each comparison")
    parser.add_argument("--seed", type=int, help="one seed, which is not counted")
    args = parser.parse_args(argv)
    seconds = args.seconds / len(args.names) if args.rounds < 0 else float("inf")
    rounds = 1 if args.seed is not None else args.rounds
    failed = 0
    for name in args.names:
        try:
            print(f"{name}: {run(name, seconds, rounds, args.seed)} rounds, no difference")
        except AssertionError:
            traceback.print_exc()
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
