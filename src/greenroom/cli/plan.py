"""`greenroom plan MODEL --memory SIZE`: finds the best settings, and estimates their speed."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from greenroom.amounts import parse_memory
from greenroom.cli.estimate.estimator import described, estimator_of, workload_of
from greenroom.cli.estimate.machine import machine_of, memory_of, on_a_gpu, processor_for
from greenroom.cli.estimate.show import as_json, facts_of, shown
from greenroom.cli.options.fields import add_options, take
from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_json, check_target, command_of, write_file
from greenroom.cli.terminal.progress import model_progress
from greenroom.config import LoadConfig, changed_options, flag
from greenroom.errors import UsageError

if TYPE_CHECKING:
    from greenroom.core.machine import Machine, Processor
    from greenroom.plan.model import Model
    from greenroom.plan.planner import Plan
    from greenroom.plan.settings import Setting

HELP = "find the best settings for a model and a memory budget, and estimate their speed"
OPTIONS = (
    "context", "kv", "read_limit", "host_memory", "miss_precision", "low_below", "co_compute",
    "config",
)  # fmt: skip
TEXTS = {
    "host_memory": "if a GPU computes: main memory that caches experts, 16GiB, or 60%% of the"
    " machine's memory (default: 80%% of the free memory)",
    "miss_precision": "also compare settings that serve cache misses from the low-precision copies"
    " of a pack, which changes the output (default: off)",
    "co_compute": "auto: also compare settings in which the host's processor computes cache misses"
    " of a GPU; the last bits of the output may then differ (default: off)",
}


def add_to(parser: Parser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL",
        help="a model: a Hugging Face folder, a GGUF file, a hub id (only config and headers are"
        " downloaded), or demo")  # fmt: skip
    add("--memory", metavar="SIZE", required=True, dest="budget",
        help="memory that the process may use: 8GiB, or 60%% of the machine's memory; if a GPU"
        " computes: memory of the GPU")  # fmt: skip
    add(
        "--target-tpot",
        metavar="TIME",
        help="also find the least memory with which a token takes this time: 120ms, or 0.12s",
    )
    add("--machine", metavar="FILE", default="auto",
        help="plan for the machine of this profile, which `greenroom doctor` wrote (default: this"
        " machine, which is measured first if it has no profile)")  # fmt: skip
    add("--processor", metavar="NAME",
        help="processor that computes the experts, by its name in the profile (default: the first"
        " GPU, or the first processor if there is no GPU)")  # fmt: skip
    add("--trace", metavar="FILE", type=Path,
        help="simulate this recorded routing of the model, from `greenroom trace record` (default:"
        " the routing of earlier runs, or a synthetic workload)",
    )  # fmt: skip
    add_json(parser)
    add(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="write the plan as one HTML page, with a chart of speed by memory",
    )
    add_options(parser, LoadConfig, names=OPTIONS, texts=TEXTS)
    parser.show("target_tpot", "trace", "machine", "json", "output")


def main(args: argparse.Namespace) -> None:
    config = take(args, LoadConfig)
    budget = parse_memory(args.budget, "--memory")
    target = None if args.target_tpot is None else seconds(args.target_tpot)
    if args.output is not None:
        check_target(args.output)
    with model_progress(args.model) as progress:
        from greenroom.plan.page import plan_page
        from greenroom.plan.planner import plan

        machine, local = machine_of(args.machine, progress)
        processor = processor_for(machine, args.processor)
        gpu = on_a_gpu(processor)
        model = described(args.model, config, gpu)
        workload = workload_of(args.trace, model)
        progress.say("comparing settings")
        estimator, measured = estimator_of(
            model, machine, workload, config, processor, config.host_memory, config.uses_host()
        )
        memory = budget.of(memory_of(machine, gpu))
        device = "cuda" if gpu else "cpu"
        planned = plan(
            estimator, memory, target, lambda slots: run_setting(model, machine, slots, device)
        )
        facts = facts_of(model, machine, workload, local, measured, planned, processor)
        setting = planned.best.setting
        lossless = setting.miss_precision == setting.co_compute == "off"
        usual = config.read_limit is None and config.host_memory is None  # as in later runs
        if local and planned.overrides_default and lossless and usual:
            store_setting(model, machine, planned, device)
        progress.clear()
        if args.json:
            print(json.dumps(as_json(planned, facts, args.model)))
        else:
            print(shown(planned, facts, args.model, run_options(config, machine, processor)))
        if args.output is not None:
            write_file(args.output, plan_page(args.model, facts, planned, command_of(args)))
            print(f"report: {args.output}", file=sys.stderr)


def seconds(text: str) -> float:
    """Parse a target time such as `120ms` or `0.12s` into seconds.

    UsageError if the text is not a time above 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*", text)
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"--target-tpot is {text!r}: write a time above 0, as 120ms or 0.12s")
    return float(match[1]) / (1e3 if match[2] == "ms" else 1)


def run_options(config: LoadConfig, machine: Machine, processor: Processor) -> str:
    """Return the command-line options of a run that a plan assumes besides its setting.

    They are --context, --kv, --read-limit and --host-memory if they are not the defaults, and
    --device if the machine has several processors.
    """
    names = ("context", "kv", "read_limit", "host_memory")
    options = {name: value for name, value in changed_options(config).items() if name in names}
    if len(machine.processors) > 1:
        options["device"] = "cuda" if on_a_gpu(processor) else "cpu"
    return "".join(f" {flag(name)} {shlex.quote(str(value))}" for name, value in options.items())


def run_setting(model: Model, machine: Machine, slots: int, device: str) -> tuple[Setting, bool]:
    """Return the default setting of a run for a number of cache slots.

    Also returns whether `tune` measured the setting. A run without --policy, --prefetch and the
    like takes this setting.
    """
    from greenroom.core.machine import machine_name
    from greenroom.plan.defaults import default_setting
    from greenroom.plan.settings import DEFAULT, Setting

    stored = None
    if slots < model.experts:
        stored = default_setting(
            model.fingerprint, machine_name(machine.host), model.experts_per_layer, model.top_k,
            slots, device,
        )  # fmt: skip
    if stored is None:
        return DEFAULT, False
    return Setting(**stored.options), stored.by == "tune"


def store_setting(model: Model, machine: Machine, best: Plan, device: str) -> None:
    """Store a plan's best setting as the default of the model's later runs.

    The setting applies to runs on this machine.
    """
    from datetime import date

    from greenroom.core.machine import machine_name
    from greenroom.plan.history.files import update_records
    from greenroom.plan.history.records import StoredSetting
    from greenroom.plan.settings import PLAIN

    name = machine_name(machine.host)
    plain = next(e for e in best.compared if e.setting == PLAIN)
    entry = StoredSetting(
        best.capacity, best.best.setting.options(), "plan", best.best.tpot, plain.tpot,
        date.today().isoformat(), device,
    )  # fmt: skip
    update_records(model.fingerprint, name, lambda records: records.with_setting(entry))
