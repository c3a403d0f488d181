"""`greenroom trace import FILE`: makes a trace from an npz file or an unfinished recording."""

from __future__ import annotations

import argparse
from pathlib import Path

from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_out, check_target
from greenroom.cli.terminal.progress import Progress
from greenroom.cli.trace.out import contents

HELP = "convert an npz file, or an unfinished recording, into a trace file"


def add_to(parser: Parser) -> None:
    parser.add_argument(
        "source",
        metavar="FILE",
        type=Path,
        help="an npz file, the journal of an unfinished recording, or a trace",
    )
    add_out(parser, "the trace file to write")


def main(args: argparse.Namespace) -> None:
    check_target(args.out)

    with Progress(f"reading {args.source}"):
        from greenroom.trace import load, save

        trace = load(args.source)
        save(trace, args.out)
    print(f"{args.out}: {contents(trace)}")
