"""`greenroom train-policy MODEL`: trains the eviction policy `next-use` from a trace."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.cli.options.fields import add_model, add_options, take
from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_json
from greenroom.cli.terminal.progress import model_progress
from greenroom.config import LoadConfig, TrainPolicyConfig
from greenroom.errors import TraceError, UsageError

if TYPE_CHECKING:
    from greenroom.core.policy import Arrays
    from greenroom.trace import Trace

HELP = "train the eviction policy next-use from recorded routing, for later runs of a model"
SHARES = (25, 50)  # capacities of the test, in % of all experts


def add_to(parser: Parser) -> None:
    add_model(parser)
    parser.add_argument(
        "--trace", metavar="T", required=True, type=Path,
        help="recorded routing of this model, from `greenroom trace record`",
    )  # fmt: skip
    add_json(parser)
    add_options(parser, TrainPolicyConfig, "training")
    add_options(parser, LoadConfig, "options", names=("config",))


def main(args: argparse.Namespace) -> None:
    config = take(args, TrainPolicyConfig)
    with model_progress(args.model) as progress:
        from greenroom.cli.trace.of_model import load_trace_of
        from greenroom.hf.checkpoint.fingerprint import fingerprint
        from greenroom.hf.checkpoint.resolve import find_checkpoint
        from greenroom.plan.history import files
        from greenroom.plan.history.routing import RoutingHistory
        from greenroom.runtime.recording.policy_training import train_policy
        from greenroom.trace import stream

        digest = fingerprint(find_checkpoint(args.model, args.config))
        if not files.is_enabled():
            raise UsageError("GREENROOM_LEARNED is off, so later runs would not read the result")
        trace = load_trace_of(args.trace, digest, f"greenroom trace record {args.model}")
        training, test = _split(trace, config)
        learned = train_policy(
            stream(training, "runtime"), trace.offsets, config,
            lambda done: progress.say("training, epochs", done, config.epochs),
        )  # fmt: skip
        progress.say("replaying requests that were held out")
        rows = _misses(test, learned)
        gain = sum(row["misses"] for row in rows) < sum(row["untrained"] for row in rows)
        path = None
        if gain:
            counts = trace.uses()
            history = files.load_routing(digest) or RoutingHistory.of_counts(counts)
            path = files.save_routing(digest, history.with_policy("next-use", learned))
    result = {
        "passes": training.passes, "held_out": test.passes, "test": rows,
        "stored": None if path is None else str(path),
    }  # fmt: skip
    print(json.dumps(result) if args.json else _report(result))


def _split(trace: Trace, config: TrainPolicyConfig) -> tuple[Trace, Trace]:
    """Split a trace's requests in those to train on, and those of the test."""
    import numpy as np

    if trace.requests < 2:
        raise TraceError(
            "the trace has one request: record at least 2, since one is needed for the test"
        )
    order = np.random.default_rng(config.seed).permutation(trace.requests)
    number = min(trace.requests - 1, max(1, round(config.held_out * trace.requests)))
    return trace.select(np.sort(order[number:])), trace.select(np.sort(order[:number]))


def _misses(test: Trace, learned: Arrays) -> list[dict[str, int]]:
    """Replay requests with what the policy has learned, with the trained network and without."""
    from greenroom.policies import policy
    from greenroom.policies.helpers.next_use_network import PREFIX
    from greenroom.sim.replay import replay
    from greenroom.trace import stream

    requests, chosen, rows = stream(test, "runtime"), policy("next-use"), []
    untrained = {name: each for name, each in learned.items() if not name.startswith(PREFIX)}
    for share in SHARES:
        capacity = max(1, int(test.offsets[-1]) * share // 100)
        untrained_misses, misses = (
            replay(requests, test.offsets, capacity, chosen, learned=arrays).misses
            for arrays in (untrained, learned)
        )
        rows.append({"percent": share, "untrained": untrained_misses, "misses": misses})
    return rows


def _report(result: dict[str, Any]) -> str:
    lines = [
        f"trained on {result['passes']} passes, tested on {result['held_out']} passes of other"
        " requests",
        "slots, in % of all experts   misses before   with training",
        *(
            f"{row['percent']:>26}{row['untrained']:>16,}{row['misses']:>10,}"
            f" ({row['misses'] / max(1, row['untrained']) - 1:+.1%})"
            for row in result["test"]
        ),
        "no gain: nothing was stored; record more requests"
        if result["stored"] is None
        else f"later runs with --policy next-use (or auto) start with it: {result['stored']}",
    ]
    return "\n".join(lines)
