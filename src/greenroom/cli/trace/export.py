"""`greenroom trace export TRACE -o FILE`: writes a trace for other programs."""

from __future__ import annotations

import argparse

from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_out, check_target
from greenroom.cli.terminal.progress import Progress
from greenroom.cli.trace.out import add_trace, contents

HELP = "write a trace as Parquet, or for the cache simulator libCacheSim"


def add_to(parser: Parser) -> None:
    add_trace(parser)
    parser.add_argument(
        "--format", choices=("parquet", "oracle-general"), required=True,
        help="parquet: a row for each token and layer. oracle-general: libCacheSim's binary format,"
        " 24 bytes for each request of order natural; a cache of N bytes has N slots",
    )  # fmt: skip
    add_out(parser, "the file to write")


def main(args: argparse.Namespace) -> None:
    check_target(args.out)
    with Progress(f"reading {args.trace}") as progress:
        from greenroom.study import load, save_oracle_general, save_parquet

        trace = load(args.trace)
        progress.say(f"writing {args.out}")
        if args.format == "parquet":
            save_parquet(trace, args.out)
            written = contents(trace)
        else:
            written = f"{save_oracle_general(trace, args.out)} requests"
    print(f"{args.out}: {written}")
