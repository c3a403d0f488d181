"""`greenroom pull MODEL`: downloads a model from the hub."""

from __future__ import annotations

import argparse
import json
import shlex
import time

from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_json
from greenroom.cli.terminal.progress import model_progress, quiet
from greenroom.config import show_bytes
from greenroom.errors import UsageError

HELP = "download a model from the hub: its config, tokenizer and weights, or one GGUF quantisation"


def add_to(parser: Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL",
        help="a hub id: owner/name, owner/name:Q4_K_M, owner/name@revision, or the address of the"
        " model's page; an interrupted download goes on where it stopped",
    )  # fmt: skip
    add_json(parser)


def main(args: argparse.Namespace) -> None:
    with model_progress(args.model) as progress:
        from greenroom.hf.checkpoint.hub.download import pull
        from greenroom.hf.checkpoint.hub.errors import RESUMED, unreachable
        from greenroom.hf.checkpoint.hub.repository import reachable
        from greenroom.hf.checkpoint.resolve import find_local

        quiet(progress)
        if find_local(args.model) is not None:
            raise UsageError(
                f"{args.model}: this model is a local one: there is nothing to download"
            )
        began = time.monotonic()
        progress.say(f"{args.model}: asking the hub")
        if not reachable():
            raise unreachable(args.model)
        try:
            result = pull(args.model)
        except KeyboardInterrupt as error:
            error.args = (RESUMED,)
            raise
    seconds = time.monotonic() - began
    if args.json:
        print(json.dumps({
            "model": args.model, "path": str(result.path), "files": result.files,
            "nbytes": result.nbytes, "downloaded": result.downloaded, "seconds": seconds,
        }))  # fmt: skip
        return
    how = "all of it was here already"
    if result.downloaded:
        how = f"{show_bytes(result.downloaded)} downloaded in {seconds:.1f} s, checksums are right"
    print(f"{args.model}: {show_bytes(result.nbytes)} in {result.files} files; {how}")
    print(f"run it: greenroom run {shlex.quote(args.model)}")
