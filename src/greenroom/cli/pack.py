"""`greenroom pack MODEL -o OUT --experts int8`: a checkpoint whose experts are one read each."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_json
from greenroom.cli.terminal.progress import model_progress, quiet
from greenroom.config import show_bytes

HELP = "pack a model: experts quantised or as they are, each one aligned read with a checksum"


def add_to(parser: Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a Hugging Face folder, a GGUF file, a hub id, or demo"
    )
    parser.add_argument(
        "-o", "--out", metavar="OUT", required=True, type=Path,
        help="the folder to make; half-made, it is OUT.unfinished, and the same command goes on",
    )  # fmt: skip
    parser.add_argument(
        "--experts", metavar="int8|int4|fp8|same", required=True,
        help="what experts are stored in; same: as they are, only laid out anew",
    )  # fmt: skip
    parser.add_argument(
        "--segments", metavar="N", type=int, default=1,
        help="cut every expert into N segments along its intermediate dimension, so that --split"
        " may keep a part of it (8 are enough for most; default: 1, whole)",
    )  # fmt: skip
    parser.add_argument(
        "--miss-precision", metavar="int8|int4", dest="precision",
        help="put a copy of each expert in this precision beside it, for misses that matter little"
        " (run --miss-precision); in an int8 pack an int4 copy is a part of the expert",
    )  # fmt: skip
    parser.add_argument(
        "--repair", action="store_true", help="make anew what is damaged in OUT, a whole pack"
    )
    add_json(parser)


def main(args: argparse.Namespace) -> None:
    with model_progress(args.model) as progress:
        from greenroom.hf.pack.packing import pack

        quiet(progress)
        progress.say(f"{args.model}: reading the checkpoint")
        try:
            made = pack(
                args.model, args.out, args.experts,
                segments=args.segments, precision=args.precision, repair=args.repair,
                progress=lambda done, of: progress.say(f"packing {args.model}", done, of),
            )  # fmt: skip
        except KeyboardInterrupt as error:
            error.args = ("the same command goes on with the pack",)
            raise
    if args.json:
        print(json.dumps({**asdict(made), "folder": str(made.folder)}))
        return
    kept = f", {made.kept} of them as they were" if made.kept else ""
    copies = ""
    if args.precision is not None:
        grows = show_bytes(made.copy_bytes)
        how = f", which add {grows}" if made.copy_bytes else " inside of them"
        copies = f", {args.precision} copies{how}"
    print(
        f"{made.folder}: {show_bytes(made.nbytes)}, {made.experts} experts in"
        f" {show_bytes(made.expert_bytes)} ({args.experts}; before"
        f" {show_bytes(made.source_expert_bytes)}){copies}{kept}, {made.seconds:.1f} s"
    )
