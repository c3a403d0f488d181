"""`greenroom trace import FILE`: convert an npz or an unfinished recording into a trace."""

from __future__ import annotations

import argparse
from pathlib import Path

from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_out, check_target
from greenroom.cli.terminal.progress import Progress
from greenroom.cli.trace.out import contents

HELP = "convert an npz, or an unfinished recording, into a trace"


def add_to(parser: Parser) -> None:
    parser.add_argument("source", metavar="FILE", type=Path, help="an npz, a journal, or a trace")
    add_out(parser, "the trace to write")


def main(args: argparse.Namespace) -> None:
    check_target(args.out)

    with Progress(f"reading {args.source}"):
        from greenroom.trace import load, save

        trace = load(args.source)
        save(trace, args.out)
    print(f"{args.out}: {contents(trace)}")
