"""`greenroom models`: lists the supported model architectures."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_json
from greenroom.cli.terminal.progress import Progress
from greenroom.sim.table import text_table

if TYPE_CHECKING:
    from greenroom.hf.model.architectures import Architecture

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
    shown = [row for row in rows if row.how != "wrapper"]
    print(text_table(
        ("architecture", "support", "in GGUF", "remarks"),
        [(row.name, row.how, _gguf_cell(row), _remarks(row)) for row in shown],
        left=4,
    ))  # fmt: skip
    of = Counter(row.how for row in rows)
    print(
        f"\n{of['native'] + of['adapter']} architectures are supported, {of['adapter']} of them"
        f" through an adapter; {of['not']} are not, for the reason given."
        "\nTests stream a tiny model of each from disk; its output has the same bits as"
        " transformers'."
        "\nin GGUF: the architecture's name in GGUF files; - if there are none that Greenroom reads"
    )
    for reason, names in _unread(shown).items():
        print(textwrap.fill(f"GGUF files not read, {reason}: {', '.join(names)}", 100))
    wrappers = ", ".join(row.name for row in rows if row.how == "wrapper")
    print(
        "\nThe text part of these multimodal architectures, which contain one of the above, is"
        " supported too:"
    )
    print(textwrap.fill(wrappers, 100))


def _gguf_cell(row: Architecture) -> str:
    from greenroom.hf.checkpoint.gguf.architectures import served_names

    return row.gguf if row.gguf in served_names() else "-"


def _remarks(row: Architecture) -> str:
    untested = () if row.tested or row.how == "not" else ("not tested",)
    return row.reason or ", ".join((*row.special, *untested))


def _unread(rows: list[Architecture]) -> dict[str, list[str]]:
    """Return the architectures whose GGUF files are not read, by the reason."""
    from greenroom.hf.checkpoint.gguf.architectures import UNREAD

    names: dict[str, list[str]] = {}
    for row in rows:
        if row.name in UNREAD:
            names.setdefault(UNREAD[row.name], []).append(row.name)
    return names
