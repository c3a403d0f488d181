"""`greenroom trace hot TRACE --task LABEL -o FILE`: the experts of a task, for --pin FILE."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_out, check_target, write_file
from greenroom.cli.terminal.progress import Progress
from greenroom.config import Amount
from greenroom.errors import UsageError

HELP = "list the experts that a task uses most, for --pin FILE"


def add_to(parser: Parser) -> None:
    add = parser.add_argument
    add("trace", metavar="TRACE", type=Path, help="a trace with labels")
    add("--task", metavar="LABEL[,LABEL...]", required=True,
        help="labels of requests; with several, a run pins those of the task nearest to each"
        " prompt;"
        " all: every label of the trace")  # fmt: skip
    add("--share", metavar="SHARE", default="10%",
        help="of every layer's experts (default: 10%%)")  # fmt: skip
    add_out(parser, "the JSON file to write")


def main(args: argparse.Namespace) -> None:
    check_target(args.out)
    share = Amount.parse(args.share, "--share").share
    if share is None:
        raise UsageError(f"--share {args.share}: write a share of every layer's experts, as 10%")
    with Progress(f"reading {args.trace}"):
        from greenroom.sim.pinned import hot_experts
        from greenroom.trace import load

        trace = load(args.trace)
        named = sorted({*trace.labels}) if args.task == "all" else args.task.split(",")
        result = hot_experts(trace, named, share)
    content = {**result.as_json(), "model": trace.meta.get("model")}
    write_file(args.out, json.dumps(content) + "\n")
    counts = ", ".join(f"{name} {task.experts.size}" for name, task in result.tasks.items())
    print(f"{args.out}: experts to pin of {int(trace.offsets[-1])}: {counts}")
