"""`greenroom train-predictor MODEL`: trains the expert predictor `learned` from a trace."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from greenroom.cli.options.fields import add_model, add_options, take
from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_json, add_out, check_target
from greenroom.cli.terminal.progress import model_progress
from greenroom.config import LoadConfig, TrainConfig

HELP = "train a predictor of a model's experts from recorded routing, for --prefetch learned"


def add_to(parser: Parser) -> None:
    add_model(parser)
    parser.add_argument(
        "--trace", metavar="T", required=True, type=Path,
        help="recorded routing of this model, from `greenroom trace record --gate-inputs`",
    )  # fmt: skip
    add_out(parser, "the file of the predictor to write")
    add_json(parser)
    add_options(parser, TrainConfig, "training")
    add_options(parser, LoadConfig, "options", names=("config",))


def main(args: argparse.Namespace) -> None:
    config = take(args, TrainConfig)
    check_target(args.out)
    with model_progress(args.model) as progress:
        import torch

        from greenroom.cli.trace.of_model import load_trace_of
        from greenroom.hf.checkpoint.fingerprint import fingerprint
        from greenroom.hf.checkpoint.resolve import find_checkpoint
        from greenroom.plan.history.files import save_predictor
        from greenroom.runtime.recording.training import result_metadata, train

        digest = fingerprint(find_checkpoint(args.model, args.config))
        command = f"greenroom trace record {args.model} --gate-inputs 1"
        trace = load_trace_of(args.trace, digest, command)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        trained = train(
            trace, config, device, lambda done: progress.say("training layers", done, trace.layers)
        )
        results = result_metadata(trace, config, trained)
        save_predictor(args.out, trained.tensors, digest, results)
    print(json.dumps(results) if args.json else _report(args.out, results))


def _report(path: Path, results: Any) -> str:
    names = list(results["accuracy"])
    rows = list(zip(*results["accuracy"].values(), strict=True))
    rows = list(enumerate(rows))[1:]  # the first layer is not predicted
    mean = [sum(column) / len(rows) for column in zip(*(row for _, row in rows), strict=True)]
    width = max(10, *(len(name) + 2 for name in names))
    lines = [
        f"{path}: distance {results['distance']} (layers ahead), hidden size {results['hidden']};"
        f" trained on {results['tokens']} tokens",
        f"accuracy on {results['held_out']} tokens of held-out requests (share of the used experts"
        " that were predicted among the top k)",
        "layer" + "".join(f"{name:>{width}}" for name in names),
        *(
            f"{label!s:<5}" + "".join(f"{share:>{width}.1%}" for share in row)
            for label, row in [*rows, ("mean", mean)]
        ),
    ]
    if results["next_gate"]:
        lines.append(f"layers that next-gate predicts: {', '.join(map(str, results['next_gate']))}")
    return "\n".join(lines)
