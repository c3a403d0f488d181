"""Make the benchmark's recordings from clones of the repositories that publish them.

    python benchmarks/policies/recordings.py olmoe-1b-7b=CLONE [NAME=CLONE ...] [--out DIR]

recordings.json has, for each recording, its repository and commit, the files that are its
requests, and the SHA-256 of its routing, which the result must have. Needs numpy and numba.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cells import RECORDINGS, digest_of

from greenroom.errors import GreenroomError, TraceError, UsageError
from greenroom.study import load_published, save


def make(name: str, clone: Path, out: Path) -> Path:
    """Make one recording from a clone; return its file."""
    if name not in RECORDINGS:
        raise UsageError(f"{name} is no recording: there are {', '.join(RECORDINGS)}")
    facts = RECORDINGS[name]
    trace = load_published(facts["format"], clone / facts["folder"], files=facts["files"])
    if (digest := digest_of(trace)) != facts["sha256"]:
        raise TraceError(
            f"{clone}: the routing has the SHA-256 {digest}, but must have {facts['sha256']}:"
            f" check out {facts['commit']} of {facts['repository']}"
        )
    out.mkdir(parents=True, exist_ok=True)
    save(trace, out / f"{name}.trace")
    return out / f"{name}.trace"


def main(args: argparse.Namespace) -> int:
    try:
        for each in args.clones:
            name, _, clone = each.partition("=")
            print(f"{make(name, Path(clone), args.out)}: as in recordings.json", flush=True)
    except GreenroomError as error:
        print(f"recordings: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clones", nargs="+", metavar="NAME=CLONE")
    parser.add_argument("--out", type=Path, default=Path("bench-data/recordings"), metavar="DIR")
    sys.exit(main(parser.parse_args()))
