"""`greenroom rm MODEL`: removes a downloaded model from the hub's cache."""

from __future__ import annotations

import argparse
import json
import sys

from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_json
from greenroom.config import show_bytes
from greenroom.errors import UsageError
from greenroom.hf.checkpoint.names import check_name

HELP = "remove a downloaded model, or one of its GGUF quantisations, from the hub's cache"


def add_to(parser: Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL",
        help="the model as `greenroom list` names it: owner/name removes all of a repository,"
        " owner/name:Q4_K_M one quantisation",
    )  # fmt: skip
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_json(parser)


def main(args: argparse.Namespace) -> None:
    check_name(args.model)
    from greenroom.hf.checkpoint.hub.cached import find_removal, remove, users_of
    from greenroom.hf.checkpoint.resolve import find_local

    if find_local(args.model) is not None:
        raise UsageError(
            f"{args.model}: this model is not in the hub's cache, and greenroom rm deletes nothing"
            " else: delete it yourself"
        )
    chosen = find_removal(args.model)
    if users := users_of(chosen.blobs):
        raise UsageError(
            f"{args.model}: in use by {', '.join(users)}: end that process first; nothing was"
            " removed"
        )
    if not args.yes and not _agrees(f"remove {args.model} ({show_bytes(chosen.nbytes)})?"):
        print(f"{args.model}: nothing was removed", file=sys.stderr)
        return
    remove(args.model, chosen)
    if args.json:
        print(json.dumps({"model": args.model, "freed_bytes": chosen.nbytes}))
        return
    print(f"{args.model}: removed; {show_bytes(chosen.nbytes)} are free again")


def _agrees(question: str) -> bool:
    """Ask the user; raises UsageError if nobody can answer."""
    if not sys.stdin or not sys.stdin.isatty():
        raise UsageError("nobody can be asked here: give --yes to remove the model")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
