"""`greenroom trace import FILE`: makes a trace from a published or an unfinished recording."""

from __future__ import annotations

import argparse
from pathlib import Path

from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_out, check_target
from greenroom.cli.terminal.progress import Progress
from greenroom.cli.trace.out import contents
from greenroom.errors import UsageError

HELP = "convert a published recording, or an unfinished one, into a trace file"


def add_to(parser: Parser) -> None:
    parser.add_argument(
        "source",
        metavar="FILE",
        type=Path,
        help="an npz file, the journal of an unfinished recording, or a trace; with --format, a"
        " folder",
    )
    parser.add_argument(
        "--format", metavar="NAME",
        help="the folder has a recording in the format of this publication, one of"
        " docs/trace-format.md: expert-selection, flame-moe, ...",
    )  # fmt: skip
    parser.add_argument(
        "--experts", metavar="N", type=int,
        help="experts of a layer, where the format does not say it (expert-selection)",
    )  # fmt: skip
    add_out(parser, "the trace file to write")


def main(args: argparse.Namespace) -> None:
    check_target(args.out)
    if args.experts is not None and args.format is None:
        raise UsageError("--experts has an effect only with --format")
    with Progress(f"reading {args.source}"):
        from greenroom.trace import load, save

        if args.format is None:
            trace = load(args.source)
        else:
            from greenroom.study import load_published

            trace = load_published(args.format, args.source, experts=args.experts)
        save(trace, args.out)
    print(f"{args.out}: {contents(trace)}")
