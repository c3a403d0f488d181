"""`greenroom plan MODEL --memory SIZE`: what to set, and how fast it will be, before it runs."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.cli.output import check_target, write_whole
from greenroom.cli.progress import Progress, quiet
from greenroom.config import CO_COMPUTE, Amount, LoadConfig, show_bytes, write_bytes
from greenroom.errors import UnknownName, UsageError
from greenroom.hf.names import check_name

if TYPE_CHECKING:
    from greenroom.core.cost import Costs
    from greenroom.core.machine import Machine, Processor
    from greenroom.plan.evidence import Evidence
    from greenroom.plan.model import Model
    from greenroom.plan.planner import Plan, Point
    from greenroom.plan.settings import Setting

HELP = "the best settings for a model and a budget, and how fast it will be"


def add_to(commands: Any) -> None:
    parser = commands.add_parser("plan", help=HELP, description=HELP)
    add = parser.add_argument
    add("model", metavar="MODEL",
        help="a Hugging Face folder, a GGUF file, a hub id (of which only headers are read), or"
        " demo")  # fmt: skip
    add("--memory", metavar="SIZE", required=True,
        help="budget of the whole process: 8GiB, or 60%% of this machine's memory")  # fmt: skip
    add("--target-tpot", metavar="TIME", help="time a token that is wanted: 120ms, or 0.12s")
    add("--machine", metavar="FILE", default="auto",
        help="the profile of a machine, as `greenroom doctor` writes it (default: this machine's,"
        " measured now if it was not before)")  # fmt: skip
    add(
        "--trace",
        metavar="FILE",
        type=Path,
        help="this model's own routing, of `greenroom trace record` (default: stand-ins)",
    )
    add("--read-limit", metavar="SIZE", help="bytes a second that experts are read at most")
    add(
        "--context",
        type=int,
        default=LoadConfig.__dataclass_fields__["context"].default,
        metavar="N",
        help="tokens that the KV cache must have room for (default: %(default)s)",
    )
    add("--miss-precision", default="off", metavar="off|int8|int4", help="compare also misses from"
        " the low-precision copies of a pack, which change the output (default: off)")  # fmt: skip
    add("--low-below", type=float, metavar="SHARE", help="with --miss-precision: misses below this"
        " share of the gate weights (default: 0.4)")  # fmt: skip
    device = parser.add_argument_group("a machine with a GPU")
    device.add_argument("--processor", metavar="NAME", help="what computes the experts, as the"
        " profile calls it (default: its first); --memory is then of its memory")  # fmt: skip
    device.add_argument("--host-memory", metavar="SIZE", help="what experts may take between the"
        " disk and it: 16GiB, or 60%% of the machine's memory")  # fmt: skip
    device.add_argument("--co-compute", default="off", metavar="|".join(CO_COMPUTE),
        help="also compare having misses computed in host memory; on a GPU answers may then differ"
        " in their last bits (default: %(default)s)")  # fmt: skip
    add("--json", action="store_true", help="print one object")
    add("-o", "--output", metavar="FILE", type=Path, help="write one HTML page with the curve")
    parser.show_first("target_tpot", "trace", "context", "machine", "json", "output")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> None:
    config = LoadConfig(
        context=args.context, read_limit=args.read_limit, miss_precision=args.miss_precision,
        low_below=args.low_below,
    )  # fmt: skip
    budget = Amount.parse(args.memory, "--memory")
    target = None if args.target_tpot is None else seconds(args.target_tpot)
    if args.co_compute not in CO_COMPUTE:
        raise UnknownName("co-compute", args.co_compute, CO_COMPUTE)
    if args.output is not None:
        check_target(args.output)
    check_name(args.model)
    with Progress(f"{args.model}: starting") as progress:
        _plan(args, config, budget, target, progress)


def _plan(
    args: argparse.Namespace,
    config: LoadConfig,
    budget: Amount,
    target: float | None,
    progress: Progress,
) -> None:
    from greenroom.plan.page import page
    from greenroom.plan.planner import plan

    machine, here = machine_of(args.machine, progress)
    processor = computes(machine, args.processor)
    gpu = on_a_gpu(processor)
    model = described(args.model, config, gpu)
    evidence = evidence_of(args.trace, model)
    progress.say("comparing settings")
    estimator, measured = estimator_of(
        model, machine, evidence, config, processor, args.host_memory, args.co_compute
    )
    memory = budget.of(memory_of(machine, gpu))
    device = "cuda" if gpu else "cpu"
    found = plan(estimator, memory, target, lambda slots: taken(model, machine, slots, device))
    facts = facts_of(model, machine, evidence, here, measured, found, processor)
    setting = found.best.setting
    lossless = setting.miss_precision == setting.co_compute == "off"
    usual = args.read_limit is None and args.host_memory is None  # as runs will be
    if here and found.sure and lossless and usual:
        keep(model, machine, found, device)
    progress.clear()
    if args.json:
        print(json.dumps(as_json(found, facts, args.model)))
    else:
        print(shown(found, facts, args.model, beside(args, machine, processor)))
    if args.output is not None:
        write_whole(
            args.output, page(args.model, facts, found, shlex.join(["greenroom", *sys.argv[1:]]))
        )
        print(f"report: {args.output}", file=sys.stderr)


def seconds(text: str) -> float:
    """`120ms` or `0.12s`; UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*", text)
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"--target-tpot is {text!r}: write a time a token above 0, as 120ms")
    return float(match[1]) / (1e3 if match[2] == "ms" else 1)


def machine_of(profile: str, progress: Progress) -> tuple[Machine, bool]:
    """(a profile, whether it is this machine's). Without one of this machine it is measured."""
    from greenroom.cli.doctor import default_profile, measure
    from greenroom.core.machine import Machine, name_of
    from greenroom.runtime.measure import host

    if profile == "auto" and not default_profile().exists():
        progress.clear()
        print("this machine has no profile yet: measuring it quickly", file=sys.stderr)
        return measure(None, True, progress), True
    machine = Machine.load(default_profile() if profile == "auto" else profile)
    return machine, name_of(machine.host) == name_of(host())


def computes(machine: Machine, name: str | None) -> Processor:
    """The processor of that name; without one the one that a run takes, which is a GPU's where
    there is one. UnknownName."""
    if name is not None:
        return machine.processor(name)
    return next((p for p in machine.processors if on_a_gpu(p)), machine.processors[0])


def on_a_gpu(processor: Processor) -> bool:
    return processor.memory == "device"


def memory_of(machine: Machine, gpu: bool) -> int:
    """Bytes that a share of memory is of; 0 where the profile does not say."""
    if gpu:
        return int(machine.measured.get("device", {}).get("memory_bytes", 0))
    return int(machine.host.get("memory_bytes", 0))


def described(source: str, config: LoadConfig, gpu: bool = False) -> Model:
    """Sizes and shape, of headers."""
    from greenroom.hf.describe import describe

    quiet()
    return describe(source, config, gpu)


def evidence_of(trace: Path | None, model: Model) -> Evidence:
    """The recording that was given, else what earlier runs left, else stand-ins. TraceError where
    it is another model's."""
    from greenroom.hf import learned
    from greenroom.hf.recent import trace_of
    from greenroom.plan.evidence import earlier, recorded, stand_ins
    from greenroom.trace import load

    if trace is not None:
        return recorded(load(trace), model, str(trace))
    own = trace_of(learned.load(model.fingerprint), model.experts_per_layer)
    return earlier(own) or stand_ins(model)


def estimator_of(
    model: Model,
    machine: Machine,
    evidence: Evidence,
    config: LoadConfig,
    processor: Processor | None = None,
    host_memory: str | None = None,
    co_compute: str = "off",
) -> Any:
    """(what estimates, runs of this model on the machine that its costs go by). `processor`
    computes, the first without one."""
    from greenroom.core.machine import name_of
    from greenroom.plan import kept
    from greenroom.plan.costs import calibrated, limited, of_machine
    from greenroom.plan.estimate import Estimator

    runs = kept.load(model.fingerprint, name_of(machine.host)).runs
    computing = processor or machine.processors[0]
    first = computing == machine.processors[0]  # whose the runs were
    costs = of_machine(machine, model, config.readers, computing.name)
    if first:
        costs = calibrated(costs, model, runs)
    host = host_slots(model, machine, costs, host_memory)
    both = co_compute != "off"
    if both and not (host and costs.host is not None):
        raise UsageError(
            "--co-compute auto needs experts in host memory (--host-memory), and a machine with a"
            " processor there and one behind it (--processor)"
        )
    limit = None
    if config.read_limit is not None:
        limit = Amount.parse(config.read_limit, "--read-limit").nbytes
    costs = limited(costs, limit, model.expert_bytes)
    measured = bool(runs) and first
    made = Estimator(
        model, costs, evidence, measured=measured, precision=config.miss_precision,
        low_below=config.low_below, host=host, both=both,
    )  # fmt: skip
    return made, len(runs) if measured else 0


def host_slots(model: Model, machine: Machine, costs: Costs, memory: str | None) -> int:
    """Experts that are kept between two links, without an amount as many as a run keeps there;
    UsageError where one is given, and there are not two."""
    if memory is None and len(costs.links) != 2:
        return 0
    if len(costs.links) != 2:
        raise UsageError(
            "--host-memory is of memory between two links, disk to host to device: give the"
            " --processor behind it"
        )
    whole = int(machine.host.get("memory_bytes", 0))
    if memory is None:
        from greenroom.hf.budget import AUTO_SHARE

        free = int(machine.host.get("available_bytes") or whole)
        return min(model.experts, int(AUTO_SHARE * free) // model.slot_bytes)
    return min(model.experts, Amount.parse(memory, "--host-memory").of(whole) // model.slot_bytes)


def facts_of(
    model: Model,
    machine: Machine,
    evidence: Evidence,
    here: bool,
    measured: int,
    found: Plan,
    processor: Processor,
) -> list[tuple[str, str]]:
    """What a plan goes by, by name."""
    from greenroom.core.machine import name_of
    from greenroom.plan.words import loaded

    whose = "this one" if here else "another machine than this one"
    runs = f", and {measured} runs of this model on it" * bool(measured)
    runs += f"; {processor.name} computes" * (len(machine.processors) > 1)
    runs += "; measured under load: greenroom doctor measures it again" * loaded(machine)
    full = model.slots_when_full(found.memory)
    slots = f"{found.capacity:,} experts" + (
        f", {full:,} when a context of {model.context:,} tokens is full"
        if full < found.capacity else ""
    )  # fmt: skip
    return [
        ("model", f"{model.experts:,} experts in {model.layers} layers, top-{model.top_k};"
                  f" {show_bytes(model.expert_bytes)} each"),
        ("machine", f"{name_of(machine.host)} ({whose}){runs}"),
        ("routing", evidence.said),
        ("slots", slots),
    ]  # fmt: skip


def beside(args: argparse.Namespace, machine: Machine, processor: Processor) -> str:
    """The options of a run that a plan was made for, beside its settings."""
    usual = LoadConfig.__dataclass_fields__["context"].default
    options = [
        ("--context", None if args.context == usual else str(args.context)),
        ("--read-limit", args.read_limit),
        ("--host-memory", args.host_memory),
        ("--device", None if len(machine.processors) == 1 else
         "cuda" if on_a_gpu(processor) else "cpu"),
    ]  # fmt: skip
    return "".join(f" {name} {shlex.quote(value)}" for name, value in options if value is not None)


def taken(model: Model, machine: Machine, slots: int, device: str) -> tuple[Setting, bool]:
    """(what a run takes that is told nothing, whether that was measured)."""
    from greenroom.core.machine import name_of
    from greenroom.hf import settled
    from greenroom.plan.settings import DEFAULT, Setting

    found = None
    if slots < model.experts:
        found = settled.taken(
            model.fingerprint, name_of(machine.host), model.experts_per_layer, model.top_k, slots,
            device,
        )  # fmt: skip
    return (DEFAULT, False) if found is None else (Setting(**found.options), found.by == "tune")


def keep(model: Model, machine: Machine, found: Plan, device: str) -> None:
    """Leave a choice that is sure to the runs that follow."""
    from datetime import date

    from greenroom.core.machine import name_of
    from greenroom.plan import kept
    from greenroom.plan.settings import PLAIN

    name = name_of(machine.host)
    plain = next(e for e in found.compared if e.setting == PLAIN)
    entry = kept.Kept(
        found.capacity, found.best.setting.options(), "plan", found.best.tpot, plain.tpot,
        date.today().isoformat(), device,
    )  # fmt: skip
    kept.save(model.fingerprint, name, kept.load(model.fingerprint, name).with_setting(entry))


def shown(found: Plan, facts: list[tuple[str, str]], source: str, beside: str = "") -> str:
    """For people. `beside` are options of the run that are no settings."""
    from greenroom.cli.output import columns
    from greenroom.plan.page import said
    from greenroom.plan.words import limits
    from greenroom.sim.report import show_time

    best = found.best
    lines = [f"{name}: {value}" for name, value in facts]
    rows = [
        (e.setting.flags(), show_time(e.tpot), f"{show_time(e.low)} to {show_time(e.high)}",
         f"{e.miss_ratio:.1%}", show_bytes(e.token_bytes))
        for e in found.compared
    ]  # fmt: skip
    lines += [
        "",
        columns(("settings", "TPOT", "range", "miss ratio", "read a token"), rows),
        "",
        shown_curve(found.curve),
        "",
    ]
    if found.target is not None:
        lines.append(said(found.target))
    size = write_bytes(found.memory * 9999 // 10000, found.memory)
    run = f"greenroom run {shlex.quote(source)} --memory {size}{beside}"
    lines += [
        limits(found),
        f"take: {run} {best.setting.flags()}",
        f"TPOT {show_time(best.tpot)} ({show_time(best.low)} to {show_time(best.high)})"
        + ("" if found.sure else ": what a run takes that is told nothing but --memory"),
    ]
    if best.ttft is not None:
        low, high = best.ttft_range
        lines.append(f"TTFT {show_time(best.ttft)} ({show_time(low)} to {show_time(high)})")
    return "\n".join(lines)


def shown_curve(points: Sequence[Point]) -> str:
    """Speed against memory, a line a budget."""
    from greenroom.cli.output import columns
    from greenroom.plan.words import HEADER, line_of

    return columns(HEADER, [line_of(point) for point in points], left=0)


def as_json(found: Plan, facts: list[tuple[str, str]], source: str) -> dict[str, Any]:
    """What `--json` prints."""
    target = found.target
    return {
        "model": source,
        **dict(facts[1:]),
        "memory": found.memory,
        "capacity": found.capacity,
        "best": found.best.as_json(),
        "sure": found.sure,
        "compared": [estimate.as_json() for estimate in found.compared],
        "curve": [{"memory": p.memory, **p.estimate.as_json()} for p in found.curve],
        "target": None if target is None else {
            "tpot_s": target.seconds,
            "memory": None if target.least is None else target.least.memory,
            "blocked": target.blocked,
            "nearest_tpot_s": target.nearest.estimate.tpot,
            "nearest_memory": target.nearest.memory,
        },
    }  # fmt: skip
