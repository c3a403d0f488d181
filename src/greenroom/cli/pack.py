"""`greenroom pack MODEL -o OUT --experts int8`: makes a pack of a model.

A pack is a checkpoint in which the bytes of each expert are contiguous and aligned, so that one
read fetches an expert.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from greenroom.cli.options.fields import add_options
from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_json
from greenroom.cli.terminal.progress import model_progress, quiet
from greenroom.config import Amount, LoadConfig, show_bytes
from greenroom.errors import UsageError

if TYPE_CHECKING:
    from greenroom.hf.pack.subset import Keep

HELP = "write a copy of a model in which each expert is one aligned read; can quantise the experts"


def add_to(parser: Parser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="the model to pack: a Hugging Face folder, a GGUF file, a hub id, or demo",
    )
    parser.add_argument(
        "-o", "--out", metavar="OUT", required=True, type=Path,
        help="the folder to write; while it is unfinished it is called OUT.unfinished, and the same"
        " command continues it",
    )  # fmt: skip
    parser.add_argument(
        "--experts", metavar="int8|int4|fp8|bf12|same", required=True,
        help="format in which the experts are stored; same: as in the model, so that only the"
        " layout"
        " changes",
    )  # fmt: skip
    parser.add_argument(
        "--segments", metavar="N", type=int, default=1,
        help="cut every expert into N segments along its intermediate dimension, so that a run with"
        " --split can cache a part of it (8 are enough for most models; default: 1, not cut)",
    )  # fmt: skip
    parser.add_argument(
        "--miss-precision", metavar="int8|int4", dest="precision",
        help="add a copy of each expert in this precision, with which a run with --miss-precision"
        " serves cache misses with a low gate weight; in an int8 pack, an int4 copy is a part of"
        " the expert and takes no more space",
    )  # fmt: skip
    parser.add_argument(
        "--keep", metavar="SHARE|FILE",
        help="pack only some experts, among which the routers then choose; this changes the output."
        " 50%% of each layer: those that --trace needs most; or those of a file of `greenroom trace"
        " hot` with one task",
    )  # fmt: skip
    parser.add_argument(
        "--trace", metavar="TRACE", type=Path,
        help="with --keep SHARE, the recorded routing that decides: by shares of gate weights where"
        " it has them (PreMoe's score), else by counts of tokens",
    )  # fmt: skip
    parser.add_argument(
        "--repair",
        action="store_true",
        help="write the damaged experts of OUT, a finished pack, again",
    )
    add_options(parser, LoadConfig, "options", names=("config",))
    add_json(parser)


def _keep(args: argparse.Namespace) -> Keep | None:
    """Return which experts `--keep` and `--trace` choose; None without them."""
    if args.keep is None:
        if args.trace is not None:
            raise UsageError("--trace has an effect only with --keep SHARE: give both, or neither")
        return None
    if args.repair:
        raise UsageError("--repair repairs the experts that the pack has: leave out --keep")
    from greenroom.hf.pack.subset import Keep
    from greenroom.hf.variants.subset import ExpertSubset

    if not args.keep.endswith("%"):
        if args.trace is not None:
            raise UsageError("--trace has an effect only with --keep SHARE, as 50%: leave it out")
        return Keep(partial(ExpertSubset.load, args.keep), ("--keep", args.keep))
    share = Amount.parse(args.keep, "--keep").share
    if share is None or not 0 < share <= 1:
        raise UsageError(f"--keep must be a share of the experts, as 50%, got {args.keep}")
    if args.trace is None:
        raise UsageError(
            f"--keep {args.keep} needs a recording of the routing, which says what is needed most:"
            " give --trace TRACE, made by `greenroom trace record MODEL --weights`"
        )
    from greenroom.trace import load

    trace = load(args.trace)
    score = "counts" if trace.weights is None else "tcess"
    return Keep(
        lambda catalog: ExpertSubset.of_trace(trace, share, score, catalog),
        ("--keep", args.keep, "--trace", str(args.trace)),
    )


def main(args: argparse.Namespace) -> None:
    with model_progress(args.model) as progress:
        from greenroom.hf.pack.packing import pack

        quiet(progress)
        progress.say(f"{args.model}: reading the checkpoint")
        try:
            packed = pack(
                args.model, args.out, args.experts,
                segments=args.segments, precision=args.precision, keep=_keep(args),
                repair=args.repair,
                config=args.config,
                progress=lambda done, of: progress.say(f"packing {args.model}", done, of),
            )  # fmt: skip
        except KeyboardInterrupt as error:
            error.args = ("the same command continues the pack",)
            raise
    if args.json:
        print(json.dumps({**asdict(packed), "folder": str(packed.folder)}))
        return
    unchanged = f", {packed.unchanged} of them unchanged" if packed.unchanged else ""
    copies = ""
    if args.precision is not None:
        grows = show_bytes(packed.copy_bytes)
        how = f", adding {grows}" if packed.copy_bytes else " inside of them"
        copies = f", {args.precision} copies{how}"
    print(
        f"{packed.folder}: {show_bytes(packed.nbytes)}, {packed.experts} experts in"
        f" {show_bytes(packed.expert_bytes)} ({args.experts}; source:"
        f" {show_bytes(packed.source_expert_bytes)}){copies}{unchanged}, {packed.seconds:.1f} s"
    )
