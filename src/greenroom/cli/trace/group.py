"""`greenroom trace`: commands that record routing as traces, and analyse traces."""

from __future__ import annotations

from greenroom.cli.options.parser import Parser, add_commands
from greenroom.cli.trace import budgets, convert, export, hot, info, record, synth

HELP = "record which experts a model's tokens use (a trace), and analyse traces"


def add_to(parser: Parser) -> None:
    commands = {
        "record": record, "import": convert, "export": export, "info": info, "synth": synth,
        "budgets": budgets, "hot": hot,
    }  # fmt: skip
    add_commands(parser, "part", commands)
