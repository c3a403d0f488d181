"""`greenroom trace hot TRACE --task LABEL -o FILE`: lists a task's most used experts.

The file is for the option --pin of a run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_out, check_target, write_file
from greenroom.cli.terminal.progress import Progress
from greenroom.config import Amount
from greenroom.errors import UsageError

HELP = "list the experts that the prompts of a task use most, for --pin FILE"


def add_to(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "trace",
        metavar="TRACE",
        type=Path,
        help="recorded routing whose requests have labels: a file of `greenroom trace record`",
    )
    add("--task", metavar="LABEL[,LABEL...]", required=True,
        help="tasks, which are labels of requests in the trace, or all for every label. With"
        " several"
        " tasks, a run pins the experts of the task whose use of experts is most like a"
        " prompt's")  # fmt: skip
    add("--share", metavar="SHARE", default="10%",
        help="share of every layer's experts to list (default: 10%%)")  # fmt: skip
    add("--score", choices=("counts", "tcess", "easy-ep"), default="counts",
        help="by which experts are chosen: how many tokens use them (counts, the default), their"
        " mean share of a token's gate weights (tcess, PreMoe's score; the trace must have gate"
        " weights), or gate weight times norm of the output times change of the token (easy-ep,"
        " EASY-EP's score; the trace must have gate weights and output norms)")  # fmt: skip
    add_out(parser, "the JSON file to write")


def main(args: argparse.Namespace) -> None:
    check_target(args.out)
    share = Amount.parse(args.share, "--share").share
    if share is None:
        raise UsageError(
            f"--share must be a share of every layer's experts, as 10%, got {args.share!r}"
        )
    with Progress(f"reading {args.trace}"):
        from greenroom.sim.pinned import hot_experts
        from greenroom.trace import load

        trace = load(args.trace)
        named = sorted({*trace.labels}) if args.task == "all" else args.task.split(",")
        result = hot_experts(trace, named, share, args.score)
    content = {**result.as_json(), "model": trace.meta.get("model")}
    write_file(args.out, json.dumps(content) + "\n")
    counts = ", ".join(f"{name} {task.experts.size}" for name, task in result.tasks.items())
    print(f"{args.out}: experts to pin, of {int(trace.offsets[-1])}, by task: {counts}")
