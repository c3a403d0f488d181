"""`greenroom trace`: make traces of routing, and look into them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.cli.budgets import add_to as add_budgets
from greenroom.cli.early import check_early
from greenroom.cli.hot import add_to as add_hot
from greenroom.cli.options import add_options, add_verbose, take
from greenroom.cli.progress import Progress, quiet
from greenroom.config import LoadConfig, RecordConfig, SamplingConfig, TopicsConfig, ZipfConfig
from greenroom.errors import UsageError
from greenroom.hf.names import check_name

if TYPE_CHECKING:
    from greenroom.runtime.stats import Stats
    from greenroom.trace import Trace
    from greenroom.trace.prompts import Prompt

HELP = "record which experts prompts use, and look into such traces"


def add_to(commands: Any) -> None:
    parser = commands.add_parser("trace", help=HELP, description=HELP)
    parser.set_defaults(main=lambda args: print(parser.format_help(), end=""))
    parts = parser.add_subparsers(dest="part", metavar="COMMAND")
    for add in (_add_record, _add_import, _add_info, _add_synth):
        add(parts)
    add_budgets(parts)
    add_hot(parts)


def _command(parts: Any, name: str, text: str, main: Any) -> Any:
    parser = parts.add_parser(name, help=text, description=text)
    parser.set_defaults(main=main)
    return parser


def _out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--out", metavar="OUT", required=True, type=Path, help="the trace to write"
    )


def _add_record(parts: Any) -> None:
    parser = _command(parts, "record", "record the routing of a model that answers prompts", record)
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder, a hub id, or demo")
    parser.add_argument(
        "--prompts", metavar="FILE", required=True, type=Path,
        help="a prompt a line, or JSON lines with prompt or messages, and label",
    )  # fmt: skip
    _out(parser)
    add_options(parser, RecordConfig, "what to record")
    add_options(parser, SamplingConfig, "sampling")
    add_verbose(parser)
    add_options(parser, LoadConfig, "memory and machine")
    parser.show_first(
        "memory", "cache", "device", "max_new_tokens", "temperature", "weights", "token_ids",
        "gate_inputs",
    )  # fmt: skip


def record(args: argparse.Namespace) -> None:
    load, sampling = take(args, LoadConfig), take(args, SamplingConfig)
    recording = take(args, RecordConfig)
    check_early(load)
    _check_out(args.out)

    from greenroom.trace.prompts import read_prompts

    prompts = read_prompts(args.prompts)
    check_name(args.model)
    with Progress(f"{args.model}: starting") as progress:
        stats = _recorded(args, load, sampling, recording, prompts, progress)

    from greenroom.trace import load as load_trace

    print(f"{args.out}: {_contents(load_trace(args.out))}")
    print(
        f"asked of the cache: {stats.expert_requests} requests,"
        f" {stats.expert_requests - stats.expert_hits} misses ({stats.capacity} slots,"
        f" {stats.policy})",
        file=sys.stderr,
    )


def _recorded(
    args: argparse.Namespace,
    load: LoadConfig,
    sampling: SamplingConfig,
    recording: RecordConfig,
    prompts: list[Prompt],
    progress: Progress,
) -> Stats:
    """Load the model, have it answer the prompts, write the trace."""
    from greenroom.hf.load import load_with
    from greenroom.hf.record import record
    from greenroom.hf.report import startup_line
    from greenroom.runtime.forecasts import choices
    from greenroom.trace.journal import journal_of

    if recording.predict is not None:
        choices(recording.predict)  # a name that is wrong is found before a model is loaded
    quiet(progress)
    model, tokenizer = load_with(args.model, load, progress=progress.of(args.model))
    began = False

    def recorded(done: int, tokens: int) -> None:
        nonlocal began
        began = True
        if done and not tokens:
            progress.clear()
            print(f"going on after {done} requests of an earlier run", file=sys.stderr)
        progress.say("recording requests", done, len(prompts))

    try:
        progress.clear()
        print(startup_line(args.model, model, load, args.verbose), file=sys.stderr, flush=True)
        model.greenroom.reset_stats()
        record(
            model, tokenizer, prompts, args.out,
            sampling=sampling, recording=recording, name=args.model, on_request=recorded,
        )  # fmt: skip
        stats: Stats = model.greenroom.stats()
    except BaseException as error:
        if began and (journal := journal_of(args.out)).exists():
            kept = f"what was recorded is in {journal}: the same command goes on"
            if isinstance(error, KeyboardInterrupt):
                error.args = (kept,)
            else:
                progress.clear()
                print(kept, file=sys.stderr)
        raise
    finally:
        model.greenroom.detach()
    return stats


def _add_import(parts: Any) -> None:
    text = "turn an npz, or a recording that did not end, into a trace"
    parser = _command(parts, "import", text, convert)
    parser.add_argument("source", metavar="FILE", type=Path, help="an npz, a journal, or a trace")
    _out(parser)


def convert(args: argparse.Namespace) -> None:
    _check_out(args.out)

    with Progress(f"reading {args.source}"):
        from greenroom.trace import load, save

        trace = load(args.source)
        save(trace, args.out)
    print(f"{args.out}: {_contents(trace)}")


def _add_info(parts: Any) -> None:
    parser = _command(parts, "info", "what is in a trace, and how local its routing is", info)
    parser.add_argument("trace", metavar="TRACE", type=Path, help="a trace, a journal or an npz")
    parser.add_argument(
        "--segments", metavar="N[,N...]", default="4,16,64",
        help="tokens of the segments that SRP and SCH are about (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--sizes", metavar="M[,M...]", default="1,2,4",
        help="caches of SCH, in multiples of top-k a layer (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--groups", metavar="N", type=int, default=40,
        help="try up to N groups of requests (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the groups")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")


def info(args: argparse.Namespace) -> None:
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
        found = {
            **_facts(trace),
            "locality": summary(trace, lengths, sizes),
            "groups": group_summary(trace, args.groups, args.seed),
        }
    print(json.dumps(found) if args.json else _report(args.trace, trace, found))


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} is {text!r}: write whole numbers as 4,16") from error
    if min(numbers) < 1:
        raise UsageError(f"{option} must be at least 1, got {min(numbers)}")
    return numbers


def _facts(trace: Trace) -> dict[str, Any]:
    """What is in a trace."""
    prefill = trace.pass_prefill
    labels: dict[str, int] = {}
    for label in trace.labels:
        labels[label] = labels.get(label, 0) + 1
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
        "gate_inputs": 0 if sample is None else len(sample.tokens),
        "predictions": {name: made.distance for name, made in trace.predictions.items()},
        "labels": labels,
        "meta": trace.meta,
    }


def _contents(trace: Trace) -> str:
    """One line."""
    most = sorted(set(trace.experts_per_layer.tolist()))
    experts = str(most[0]) if len(most) == 1 else f"{most[0]} to {most[-1]}"
    return (
        f"{trace.tokens} tokens of {trace.requests} requests in {trace.passes} passes"
        f" ({int(trace.pass_prefill.sum())} prefill), {trace.layers} layers x {experts} experts,"
        f" top-{trace.top_k}"
    )


def _report(path: Path, trace: Trace, found: dict[str, Any]) -> str:
    local, group = found["locality"], found["groups"]
    beside = [name for name in ("weights", "token_ids", "gate_inputs") if found[name]]
    labels = sorted(found["labels"].items(), key=lambda item: -item[1])
    named = ", ".join(f"{label or '(none)'} {n}" for label, n in labels[:8])
    more = f" and {len(labels) - 8} more" if len(labels) > 8 else ""
    distances = ", ".join(
        "-" if x is None else f"{x:.0f}" for x in local["reuse_distance_by_layer"]
    )
    gaps = ", ".join("-" if x is None else f"{x:.0f}" for x in local["reuse_gap_by_layer"])
    lines = [
        f"{path}: {_contents(trace)}",
        f"model: {found['meta'].get('model', 'not named')}",
        f"also recorded: {', '.join([*beside, *found['predictions']]) or 'nothing'}",
        f"labels: {named}{more}",
        *(["the last request was cut short"] if "last_request" in found["meta"] else []),
        "",
        f"adjacent-token overlap   {local['overlap']:.3f} (uniform {local['overlap_uniform']:.3f})",
        *_by_label(local["overlap_by_label"]),
        "uses of the most used    "
        + ", ".join(f"{share} {x:.1%}" for share, x in local["popularity_cdf"].items())
        + f" ({local['unused_experts']} experts never)",
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


def _add_synth(parts: Any) -> None:
    text = "make a synthetic trace"
    parser = parts.add_parser("synth", help=text, description=text)
    parser.set_defaults(main=lambda args: print(parser.format_help(), end=""))
    kinds = parser.add_subparsers(dest="kind", metavar="KIND")
    for kind, config in (("zipf", ZipfConfig), ("topics", TopicsConfig)):
        text = " ".join((config.__doc__ or "").split()).replace("%", "%%")
        made = kinds.add_parser(kind, help=text.partition(":")[0], description=text)
        _out(made)
        add_options(made, config, kind)
        made.set_defaults(main=synth, config=config)


def synth(args: argparse.Namespace) -> None:
    options = take(args, args.config)
    _check_out(args.out)

    with Progress(f"making {args.out}"):
        from greenroom.trace import save, synth

        make: Any = getattr(synth, args.kind)
        trace = make(options)
        save(trace, args.out)
    print(f"{args.out}: {_contents(trace)}")


def _check_out(path: Path) -> None:
    """Before anything is computed: UsageError where the trace could not be written."""
    if path.is_dir():
        raise UsageError(f"{path}: is a folder; name a file for the trace")
    if not path.resolve().parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}")
