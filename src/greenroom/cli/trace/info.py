"""`greenroom trace info TRACE`: describes a trace, and how local its routing is."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_json
from greenroom.cli.terminal.progress import Progress
from greenroom.cli.trace.out import add_trace, contents
from greenroom.errors import UsageError

if TYPE_CHECKING:
    from greenroom.trace import Trace

HELP = "show what a trace contains, and how local its routing is"


def add_to(parser: Parser) -> None:
    add_trace(parser)
    parser.add_argument(
        "--segments", metavar="N[,N...]", default="4,16,64",
        help="lengths in tokens of the segments on which the locality measures SRP and SCH are"
        " computed (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--sizes", metavar="M[,M...]", default="1,2,4",
        help="cache sizes for the locality measure SCH: slots of a layer in multiples of the top-k"
        " (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--groups", metavar="N", type=int, default=40,
        help="divide the requests into at most N groups with similar use of experts (default:"
        " %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--seed",
        metavar="N",
        type=int,
        default=0,
        help="seed of the random numbers by which groups begin (default: 0)",
    )
    add_json(parser)


def main(args: argparse.Namespace) -> None:
    lengths, sizes = _numbers("--segments", args.segments), _numbers("--sizes", args.sizes)
    if args.groups < 1:
        raise UsageError(f"--groups must be at least 1, got {args.groups}")
    if args.seed < 0:
        raise UsageError(f"--seed must not be negative, got {args.seed}")

    with Progress(f"reading {args.trace}") as progress:
        from greenroom.trace import load
        from greenroom.trace.groups import summary as group_summary
        from greenroom.trace.locality import summary

        trace = load(args.trace)
        progress.say("measuring locality")
        facts = {
            **_facts(trace),
            "locality": summary(trace, lengths, sizes),
            "groups": group_summary(trace, args.groups, args.seed),
        }
    print(json.dumps(facts) if args.json else _report(args.trace, trace, facts))


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(
            f"{option} must be whole numbers separated by commas, as 4,16, got {text!r}"
        ) from error
    if min(numbers) < 1:
        raise UsageError(f"{option} must be at least 1, got {min(numbers)}")
    return numbers


def _facts(trace: Trace) -> dict[str, Any]:
    """Return the numbers of tokens, layers, experts and other contents of a trace, for JSON."""
    prefill = trace.pass_prefill
    lengths = trace.pass_starts[1:] - trace.pass_starts[:-1]
    sample = trace.gate_inputs
    return {
        "tokens": trace.tokens,
        "requests": trace.requests,
        "passes": trace.passes,
        "prefill_passes": int(prefill.sum()),
        "prefill_tokens": int(lengths[prefill].sum()),
        "layers": trace.layers,
        "experts_per_layer": trace.experts_per_layer.tolist(),
        "top_k": trace.top_k,
        "weights": trace.weights is not None,
        "token_ids": trace.token_ids is not None,
        "output_norms": trace.output_norms is not None,
        "gate_inputs": 0 if sample is None else len(sample.tokens),
        "predictions": {name: each.distance for name, each in trace.predictions.items()},
        "labels": dict(Counter(trace.labels)),
        "meta": trace.meta,
    }


def _report(path: Path, trace: Trace, facts: dict[str, Any]) -> str:
    local, group = facts["locality"], facts["groups"]
    optional = ("weights", "token_ids", "output_norms", "gate_inputs")
    fields = [name for name in optional if facts[name]]
    labels = sorted(facts["labels"].items(), key=lambda item: -item[1])
    named = ", ".join(f"{label or '(none)'} {n}" for label, n in labels[:8])
    more = f" and {len(labels) - 8} more" if len(labels) > 8 else ""
    distances = ", ".join(
        "-" if x is None else f"{x:.0f}" for x in local["reuse_distance_by_layer"]
    )
    gaps = ", ".join("-" if x is None else f"{x:.0f}" for x in local["reuse_gap_by_layer"])
    lines = [
        f"{path}: {contents(trace)}",
        f"model: {facts['meta'].get('model', 'not named')}",
        f"also recorded: {', '.join([*fields, *facts['predictions']]) or 'nothing'}",
        f"labels: {named}{more}",
        *(["the last request was cut short"] if "last_request" in facts["meta"] else []),
        "",
        f"adjacent-token overlap   {local['overlap']:.3f} (uniform {local['overlap_uniform']:.3f})",
        *_by_label(local["overlap_by_label"]),
        "uses of the most used    "
        + ", ".join(f"{share} {x:.1%}" for share, x in local["popularity_cdf"].items())
        + f" ({local['unused_experts']} experts never used)",
        f"reuse distance, by layer {distances} (median, experts of the layer)",
        f"reuse gap, by layer      {gaps} (median, tokens)",
        "LRU hits, per layer      "
        + ", ".join(f"{c} slots {x:.1%}" for c, x in local["lru_hits_per_layer"].items()),
    ]
    for part in local["segments"]:
        sizes = part["sch"].items()
        if part["windows"]:
            hits = ", ".join(f"{c} slots a layer {x:.1%}" for c, x in sizes)
            lines.append(f"segments of {part['length']:<4} SRP    {part['srp']:.3f}, SCH {hits}")
        else:
            lines.append(f"segments of {part['length']:<4}        no request is that long")
    lines.append(
        f"groups of requests       {group['number']} (elbow), the largest has"
        f" {group['largest']:.1%}; transitions: highest {group['highest_transition']:.2f},"
        f" {group['low_transitions']:.0%} of them below 0.12"
    )
    return "\n".join(lines)


def _by_label(overlap: dict[str, float]) -> list[str]:
    if not 2 <= len(overlap) <= 8:
        return []
    shares = ", ".join(f"{label or '(none)'} {share:.3f}" for label, share in overlap.items())
    return [f"  by label               {shares}"]
