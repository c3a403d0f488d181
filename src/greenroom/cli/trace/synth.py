"""`greenroom trace synth KIND`: makes a synthetic trace of routing."""

from __future__ import annotations

import argparse
from typing import Any

from greenroom.cli.options.fields import add_options, take
from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_out, check_target
from greenroom.cli.terminal.progress import Progress
from greenroom.cli.trace.out import contents
from greenroom.config import TopicsConfig, ZipfConfig

HELP = "make a synthetic trace of routing"
KINDS = {
    "zipf": (ZipfConfig, "draw each layer's experts independently, by a Zipf law: expert j, counted"
             " from 1, in proportion to 1 / (j + b)^a"),
    "topics": (TopicsConfig, "give each request a topic that prefers some experts, and let tokens"
               " reuse experts of the token before"),
}  # fmt: skip


def add_to(parser: Parser) -> None:
    parser.set_defaults(main=lambda args: print(parser.format_help(), end=""))
    kinds = parser.add_subparsers(dest="kind", metavar="KIND")
    for kind, (config, text) in KINDS.items():
        command = kinds.add_parser(kind, help=text, description=text)
        add_out(command, "the trace file to write")
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
