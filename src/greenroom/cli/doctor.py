"""`greenroom doctor [MODEL]`: measures this machine, and estimates a model's speed on it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.cli.estimate.card import (
    add_card_options,
    check_card_options,
    predict_on_card,
    predict_on_gpu,
)
from greenroom.cli.estimate.machine import default_profile, machine_of, measure
from greenroom.cli.options.fields import add_options, take
from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_json
from greenroom.cli.terminal.progress import Progress, model_progress
from greenroom.config import LoadConfig, show_bytes
from greenroom.sim.table import text_table

if TYPE_CHECKING:
    from greenroom.core.cost import Link
    from greenroom.core.machine import Machine, Processor, Table
    from greenroom.runtime.measure.expert_reads import ExpertReads

LEAST_GAIN = 0.05  # of a copy for --repack: less is not worth its disk space
READ_S = 4.0  # for comparing reads of experts

HELP = "measure this machine; with MODEL, say whether the model fits here and how fast it would run"


def add_to(parser: Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?",
        help="also say whether this model fits, with which memory budget, and how fast it would"
        " run:"
        " a folder, a GGUF file, a hub id (only config and headers are downloaded), or demo",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="measure less exactly, in under 30 seconds"
    )
    parser.add_argument(
        "--path", metavar="PATH", type=Path,
        help="measure the disk of this path: the folder or file of a model, which is read, or"
        " another folder, in which a temporary file is made (default: the folder of downloaded"
        " models)",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path,
        help="write the machine's profile to this file (default:"
        f" {default_profile()}, which --machine auto reads)",
    )  # fmt: skip
    add_options(parser, LoadConfig, "options", names=("config",))
    add_json(parser, "the profile as JSON")
    parser.show("quick", "path", "output", "json")
    add_card_options(parser)


def main(args: argparse.Namespace) -> None:
    check_card_options(args)
    if args.model is not None:
        with model_progress(args.model) as progress:
            return (of_model if args.gpu is None else predict_on_card)(args, progress)
    with Progress("starting") as progress:
        machine = measure(args.path, args.quick, progress, args.output)
    if args.json:
        print(json.dumps(machine.as_json()))
    else:
        from greenroom.plan import summary

        print(table(machine))
        print("\n" + "\n".join(summary.machine_summary(machine)))
    print(
        f"profile saved to {args.output or default_profile()}, for --machine of `greenroom plan`,"
        " `tune` and `simulate`",
        file=sys.stderr,
    )
    return None


def of_model(args: argparse.Namespace, progress: Progress) -> None:
    """Print whether a model fits this machine and how fast it would run."""
    from greenroom.cli.estimate.estimator import described, estimator_of
    from greenroom.cli.estimate.show import shown_curve
    from greenroom.hf.memory.budget import budget_bytes
    from greenroom.plan import summary
    from greenroom.plan.planner import default_curve
    from greenroom.plan.workload import synthetic_workload
    from greenroom.runtime.memory.system import available_bytes, rss_bytes

    config = take(args, LoadConfig)
    model = described(args.model, config)
    if args.quick or args.path is not None or args.output is not None:
        machine, local = measure(args.path, args.quick, progress, args.output), True
    else:
        machine, local = machine_of("auto", progress)
    progress.say("reading experts")
    reads = expert_reads(args.model, config)
    progress.say("estimating")
    memory = budget_bytes("auto")
    available = available_bytes() + rss_bytes()
    workload = synthetic_workload(model)
    estimator, runs = estimator_of(model, machine, workload, config)
    points = default_curve(estimator, available)
    gpu = predict_on_gpu(args.model, config, machine) or {}
    fits = memory >= model.least_memory
    progress.clear()
    if args.json:
        print(json.dumps({
            "model": args.model, "fits": fits, "least_memory": model.least_memory,
            "whole_memory": model.memory(model.experts), "available": available,
            "routing": workload.description, "runs": runs,
            "expert_reads": reads and reads._asdict(),
            "curve": [{"memory": p.memory, **p.as_json()} for p in points],
            "gpu": {name: gpu[name] for name in ("moved", "shared")} if gpu else None,
        }))  # fmt: skip
        return
    lines = [*summary.machine_summary(machine), "", *summary.model_summary(model, available), ""]
    lines += [shown_curve(points), "", f"routing: {workload.description}"]
    if runs:
        lines.append(
            f"the estimate is calibrated by {runs} measured runs of this model on this machine"
        )
    if fits:
        lines.append(f"recommended: greenroom run {args.model} --memory auto")
    lines += ["", *gpu["lines"], ""] if gpu else []
    if reads is not None and reads.steady and reads.gain > LEAST_GAIN:
        lines.append(repack_line(args.model, reads))
    if not local:
        lines.append(
            "the stored profile is of another machine: run `greenroom doctor` to measure this one"
        )
    print("\n".join(lines))


def expert_reads(source: str, config: LoadConfig) -> ExpertReads | None:
    """Measure how much faster experts would be read from a copy of `--repack`.

    None if the model is not on this machine, is too small to measure, or has one range already.
    """
    from greenroom.hf.checkpoint.hub.download import cached_model
    from greenroom.hf.checkpoint.resolve import find_local, open_checkpoint
    from greenroom.hf.model.skeleton import ModelSkeleton
    from greenroom.runtime.measure.expert_reads import measure_expert_reads

    if (path := find_local(source) or cached_model(source)) is None:
        return None
    checkpoint = open_checkpoint(path, config.config)
    catalog = ModelSkeleton.of(checkpoint).catalog
    return measure_expert_reads(catalog, checkpoint.files, config.readers, READ_S)


def repack_line(source: str, reads: ExpertReads) -> str:
    """Return the line that suggests `--repack`."""
    return (
        f"each expert lies in {reads.ranges} ranges, read at {reads.as_stored / 1e9:.2f} GB/s; one"
        f" range each is read {reads.gain:.0%} faster: greenroom run {source} --repack DIR makes"
        f" such a copy in DIR, which needs {show_bytes(reads.nbytes)} of disk space"
    )


def table(machine: Machine) -> str:
    """Format the bandwidths and compute times of a measured machine as text tables."""
    host, measured = machine.host, machine.measured
    disk, link = measured["disk"], machine.routes[0].link
    kernels = f" kernels {host['kernels']}," if "kernels" in host else ""
    lines = [
        f"{host['cpu']}, {host['cores']} cores ({' '.join(host['instructions']) or 'plain'}),"
        f"{kernels} {show_bytes(host['memory_bytes'])} of memory, torch {host['torch']},"
        f" load {host['load']:.1f}",
        "",
        text_table(
            ("memory read", "GB/s"),
            [(f"{n} thread{'s' * (n != '1')}", f"{rate / 1e9:.1f}") for n, rate in
             measured["memory"].items()],
        ),
        "",
    ]  # fmt: skip
    lines += _disk(disk, link)
    if (device := measured.get("device")) is not None:
        lines += [
            text_table(
                (device["name"], "GB/s"),
                [(name, "refused" if rate is None else f"{rate / 1e9:.1f}") for name, rate in (
                    ("from host memory, pinned", device["pinned"]),
                    ("from host memory, pageable", device["pageable"]),
                    ("its own memory", device["memory"]),
                )],
            ),
            "",
        ]  # fmt: skip
    for processor in machine.processors:
        lines += _processor(processor)
    return "\n".join([*lines, f"measured in {measured['seconds']:.1f} s"])


def _disk(disk: dict[str, Any], link: Link) -> list[str]:
    rates = {(read["nbytes"], read["threads"]): read["bandwidth"] for read in disk["reads"]}
    threads = sorted({n for _, n in rates})
    kind = "past the page cache" if disk["direct"] else "through the page cache, cold"
    return [
        text_table(
            ("disk, GB/s", *(f"{n} thread{'s' * (n > 1)}" for n in threads)),
            [
                (show_bytes(size), *(f"{rates[size, n] / 1e9:.2f}" for n in threads))
                for size in sorted({size for size, _ in rates})
            ],
        ),
        f"random reads {kind}, in {disk['path']}; estimates"
        f" assume {link.bandwidth / 1e9:.2f} GB/s, a latency of {link.latency * 1e6:.0f} us and"
        f" {link.lanes} read{'s' * (link.lanes > 1)} at a time",
        "",
    ]


def _processor(processor: Processor) -> list[str]:
    from greenroom.core.cost import COOLED

    lines = [
        _times(f"{processor.name}, one expert", processor.expert),
        "",
        _times(f"{processor.name}, one dense layer", processor.dense),
        "",
    ]
    if processor.layer:
        size = processor.expert.nbytes[0]
        handled = processor.fetch + processor.copy * size
        lines += [
            f"overhead: {processor.layer * 1e3:.2f} ms per layer, {handled * 1e3:.2f} ms per"
            f" fetched expert of {show_bytes(size)}, {processor.wake * COOLED * 1e3:.2f} ms after"
            f" a wait of {COOLED * 1e3:g} ms",
            "",
        ]
    return lines


def _times(title: str, times: Table) -> str:

    return text_table(
        (f"{title}, ms", *(f"{n} token{'s' * (n > 1)}" for n in times.tokens)),
        [
            (show_bytes(size), *(f"{seconds * 1e3:.3f}" for seconds in row))
            for size, row in zip(times.nbytes, times.seconds, strict=True)
        ],
    )
