"""`greenroom trace synth KIND`: make a synthetic trace."""

from __future__ import annotations

import argparse
from typing import Any

from greenroom.cli.options.fields import add_options, take
from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_out, check_target
from greenroom.cli.terminal.progress import Progress
from greenroom.cli.trace.out import contents
from greenroom.config import TopicsConfig, ZipfConfig

HELP = "make a synthetic trace"


def add_to(parser: Parser) -> None:
    parser.set_defaults(main=lambda args: print(parser.format_help(), end=""))
    kinds = parser.add_subparsers(dest="kind", metavar="KIND")
    for kind, config in (("zipf", ZipfConfig), ("topics", TopicsConfig)):
        text = " ".join((config.__doc__ or "").split()).replace("%", "%%")
        command = kinds.add_parser(kind, help=text.partition(":")[0], description=text)
        add_out(command, "the trace to write")
        add_options(command, config, kind)
        command.set_defaults(main=main, config=config)


def main(args: argparse.Namespace) -> None:
    options = take(args, args.config)
    check_target(args.out)

    with Progress(f"making {args.out}"):
        from greenroom.trace import save, synth

        make: Any = getattr(synth, args.kind)
        trace = make(options)
        save(trace, args.out)
    print(f"{args.out}: {contents(trace)}")
