"""`greenroom models`: lists the supported model architectures."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import Counter
from dataclasses import asdict

from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_json
from greenroom.cli.terminal.progress import Progress
from greenroom.sim.table import text_table

HELP = "list the supported model architectures"


def add_to(parser: Parser) -> None:
    add_json(parser, "one JSON list")


def main(args: argparse.Namespace) -> None:
    with Progress("reading transformers' architectures"):
        from greenroom.hf.model.architectures import architectures

        rows = architectures()
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(
        text_table(
            ("architecture", "how", "tested", "GGUF", "special"),
            [
                (
                    row.name,
                    row.how,
                    "yes" if row.tested else "no",
                    row.gguf,
                    row.reason or ", ".join(row.special),
                )
                for row in rows
                if row.how != "wrapper"
            ],
            left=5,
        )
    )
    of = Counter(row.how for row in rows)
    served = of["native"] + of["adapter"]
    wrappers = ", ".join(row.name for row in rows if row.how == "wrapper")
    print(
        f"\n{served} architectures are supported, {of['adapter']} of them through an adapter;"
        f" {of['not']} are not, for the reason given."
        "\ntested: a tiny model of the architecture, streamed from disk, gives the same bits as"
        " transformers"
        "\nGGUF: the architecture's name in GGUF files, or why these are not read"
        "\n\nThe text part of these multimodal architectures, which contain one of the above, is"
        " supported too:"
    )
    print(textwrap.fill(wrappers, 100))
