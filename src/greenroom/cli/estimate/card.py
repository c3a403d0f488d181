"""`greenroom doctor MODEL`: speed on this machine's GPU, or with `--gpu` on one elsewhere."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.amounts import parse_memory
from greenroom.cli.estimate.estimator import described
from greenroom.cli.estimate.machine import default_profile, machine_of, memory_of, on_a_gpu
from greenroom.cli.options.fields import take
from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import check_target, write_file
from greenroom.cli.terminal.progress import Progress
from greenroom.config import LoadConfig, show_bytes
from greenroom.errors import BudgetError, UsageError
from greenroom.option import at_least
from greenroom.sim.table import show_number, show_time, text_table

if TYPE_CHECKING:
    from greenroom.core.machine import Machine
    from greenroom.plan.cards.machine import Host
    from greenroom.plan.cards.predict import Prediction
    from greenroom.plan.cards.table import Card
    from greenroom.plan.estimate import Estimate
    from greenroom.plan.model import Model

# Options that --gpu needs.
OF_HOST = ("memory", "memory_bandwidth", "disk_speed", "pcie", "num_gpus")
DISK_LATENCY, DISK_LANES = 100e-6, 4  # of an NVMe disk, and reads under way


def add_card_options(parser: Parser) -> None:
    """Add the options that name a graphics card and the machine around it."""
    group = parser.add_argument_group("a machine that you do not have")
    group.add_argument(
        "--gpu", metavar="CARD",
        help="predict the speed of MODEL with this graphics card from data sheets: 'RTX 4090', 4090"
        " (`greenroom list --gpus` shows all)",
    )  # fmt: skip
    group.add_argument(
        "--memory", metavar="SIZE",
        help="with --gpu: that machine's main memory, of which 80 %% hold experts (default: as much"
        " as this machine has)",
    )  # fmt: skip
    group.add_argument(
        "--memory-bandwidth", metavar="RATE",
        help="with --gpu: bytes a second of its main memory by the data sheet: 90GB for two"
        " channels of DDR5-5600 (default: as measured here)",
    )  # fmt: skip
    group.add_argument(
        "--disk-speed", metavar="RATE",
        help="with --gpu: bytes a second that its disk reads, as 5GB (default: as measured here)",
    )  # fmt: skip
    group.add_argument(
        "--pcie", metavar="SLOT",
        help="with --gpu: generation and lanes of the card's slot, as 4x8 (default: the card's)",
    )  # fmt: skip
    group.add_argument(
        "--num-gpus", metavar="N", type=int,
        help="with --gpu: number of such cards, each in a slot of its own (default: 1)",
    )  # fmt: skip
    parser.show("gpu")


def check_card_options(args: argparse.Namespace) -> None:
    """Check that the options of a machine with a graphics card belong together; UsageError."""
    if args.gpu is None:
        for name in OF_HOST:
            if getattr(args, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} describes the machine of --gpu: give --gpu CARD too")
        return
    if args.model is None:
        raise UsageError("--gpu predicts the speed of a model: name one, as in"
                         " `greenroom doctor MODEL --gpu 'RTX 4090'`")  # fmt: skip
    if args.quick or args.path is not None:
        raise UsageError("--quick and --path measure this machine: leave them out with --gpu")
    output: Path | None = args.output
    if output is not None and output.resolve() == default_profile().resolve():
        raise UsageError(f"--output {output} is this machine's profile: name another file, since"
                         " --gpu predicts another machine")  # fmt: skip
    if args.num_gpus is not None:
        at_least(1)(args.num_gpus, "--num-gpus")


def predict_on_card(args: argparse.Namespace, progress: Progress) -> None:
    """Print the predicted speed of a model with a graphics card.

    With --output, the predicted machine's profile is written to this file.
    """
    from greenroom.hf.memory.budget import AUTO_SHARE
    from greenroom.plan.cards.machine import predict_machine
    from greenroom.plan.cards.predict import predict
    from greenroom.plan.cards.table import find_card
    from greenroom.plan.costs import machine_costs
    from greenroom.plan.workload import synthetic_workload

    config, card = take(args, LoadConfig), find_card(args.gpu)
    if args.output is not None:
        check_target(args.output)
    host = host_of(args, progress)
    machine = predict_machine(card, host)
    model, budget = described(args.model, config, gpu=True), int(AUTO_SHARE * card.memory)
    if budget < model.least_memory:
        raise BudgetError(
            f"{model.name} needs {show_bytes(model.least_memory)} of the card's memory,"
            f" {show_bytes(model.dense_bytes)} of it for all weights but experts:"
            f" {AUTO_SHARE:.0%} of a {card.name}'s are {show_bytes(budget)}"
        )
    progress.say("estimating")
    workload = synthetic_workload(model)
    costs = machine_costs(machine, model, config.readers, "gpu")
    cards, memory = args.num_gpus or 1, int(AUTO_SHARE * host.memory)
    predicted = predict(model, costs, workload, budget, memory, cards=cards)
    progress.clear()
    if args.output is not None:
        write_file(args.output, json.dumps(machine.as_json(), indent=1) + "\n")
    if args.json:
        print(json.dumps(as_json(args.model, card, machine, predicted, cards)))
        return
    print("\n".join([
        *assumptions(card, host, machine), "", *fit(model, predicted, cards), "",
        table(predicted), "", *recommendation(predicted), f"routing: {workload.description}",
    ]))  # fmt: skip


def predict_on_gpu(source: str, config: LoadConfig, machine: Machine) -> dict[str, Any] | None:
    """Predict a model's speed on the GPU that a machine's profile has; None without one.

    The result has the lines to print, and the JSON fields `moved` and `shared`: estimates with the
    measured times of GPU, link and host, and the host's work for layers and misses.
    """
    from greenroom.hf.memory.budget import AUTO_SHARE
    from greenroom.plan.cards.machine import with_host_work
    from greenroom.plan.cards.predict import predict
    from greenroom.plan.costs import machine_costs
    from greenroom.plan.workload import synthetic_workload

    processors = [with_host_work(p) if on_a_gpu(p) else p for p in machine.processors]
    gpu = next((p for p in processors if on_a_gpu(p)), None)
    budget, memory = (int(AUTO_SHARE * memory_of(machine, each)) for each in (True, False))
    if gpu is None or not budget:
        return None
    model = described(source, config, gpu=True)
    if budget < model.least_memory:
        need = f"the GPU is too small: {model.name} needs {show_bytes(model.least_memory)} there"
        return {"lines": [need], "moved": None, "shared": None}
    machine = replace(machine, processors=tuple(processors))
    costs = machine_costs(machine, model, config.readers, gpu.name)
    predicted = predict(model, costs, synthetic_workload(model), budget, memory)
    lines = ["with the GPU, as measured:", *fit(model, predicted, 1), "", table(predicted)]
    if advice := recommendation(predicted):
        lines += ["", *advice]
    shared = predicted.shared and predicted.shared.as_json()
    return {"lines": lines, "moved": predicted.moved.as_json(), "shared": shared}


def host_of(args: argparse.Namespace, progress: Progress) -> Host:
    """Describe the machine around a graphics card by the options, and this machine's profile.

    The profile is read, or measured, only if an option is missing. UsageError for wrong values.
    """
    from greenroom.core.cost import Link
    from greenroom.plan.cards.machine import HOST_SHARE, Host
    from greenroom.plan.cards.table import Pcie

    slot = None if args.pcie is None else Pcie.parse(args.pcie, "--pcie")
    memory = None if args.memory is None else parse_memory(args.memory, "--memory").nbytes
    if args.memory is not None and memory is None:
        raise UsageError(f"--memory must be a size, as 64GiB, got {args.memory!r}")
    sheet, speed = (rate(args, name) for name in ("memory_bandwidth", "disk_speed"))
    bandwidth = None if sheet is None else HOST_SHARE * sheet
    disk = None if speed is None else Link(speed, DISK_LATENCY, DISK_LANES)
    if memory is None or bandwidth is None or disk is None:
        local, _ = machine_of("auto", progress)
        memory = memory or int(local.host.get("memory_bytes", 0))
        bandwidth = bandwidth or max(map(float, local.measured["memory"].values()))
        disk = disk or local.routes[0].link
    return Host(memory, bandwidth, disk, slot)


def rate(args: argparse.Namespace, name: str) -> float | None:
    """Parse an option that is a rate in bytes a second; UsageError for a wrong value."""
    value, option = getattr(args, name), f"--{name.replace('_', '-')}"
    if value is None:
        return None
    nbytes = parse_memory(value, option).nbytes
    if nbytes is None:
        raise UsageError(f"{option} must be bytes a second, as 5GB, got {value!r}")
    return float(nbytes)


def assumptions(card: Card, host: Host, machine: Machine) -> list[str]:
    """Describe a predicted machine, and the shares of data sheets that the prediction assumes."""
    from greenroom.plan.cards import host_work
    from greenroom.plan.cards import machine as shares

    link = machine.routes[1].link.bandwidth
    return [
        f"This is a prediction from data sheets; nothing was measured on a {card.name} for it.",
        f"{card.name}: {show_bytes(card.memory)} at {card.bandwidth / 1e9:,.0f} GB/s, of which"
        f" {shares.MEMORY_SHARE:.0%} are assumed, as other engines reach with dense models; PCIe"
        f" {card.pcie.with_slot(host.slot)} at {link / 1e9:.1f} GB/s, {shares.PCIE_SHARE:.0%} of"
        " the data sheet.",
        f"host: {show_bytes(host.memory)} of memory at {host.bandwidth / 1e9:.1f} GB/s, disk at"
        f" {host.disk.bandwidth / 1e9:.2f} GB/s; Python takes"
        f" {(host_work.LAYER + host_work.HIT) * 1e3:.2g} ms a layer,"
        f" {host_work.PIECE * 1e3:.2g} ms where the layer is one graph, and"
        f" {host_work.MISS * 1e3:.2g} ms more if experts are missing"
        f" ({host_work.SHARED_MISS * 1e3:.2g} with --co-compute auto), as measured without a GPU.",
        "docs/planning.md has the sources of these figures, and predictions beside published"
        " measurements of other engines.",
    ]


def fit(model: Model, predicted: Prediction, cards: int) -> list[str]:
    """Describe how many of a model's experts cards and main memory hold."""
    memory = "the card's memory" if cards == 1 else f"the memory of {cards} cards"
    if not predicted.fits:
        lines = [
            f"{model.name}: {predicted.capacity:,} of {model.experts:,} experts fit in 80 % of"
            f" {memory}, {predicted.host:,} in 80 % of main memory."
        ]
    else:
        lines = [f"{model.name}: all {model.experts:,} experts fit in {memory}."]
    if predicted.graph:
        lines.append("The pass of a token is one CUDA graph, which takes almost no time of Python.")
    elif predicted.pieces:
        lines.append("The pass of a token is one CUDA graph for each layer.")
    elif predicted.fits and cards == 1:
        lines.append("The pass of a token is no CUDA graph: this model has none.")
    if cards > 1:
        lines.append(f"placement: {predicted.placement}.")
    return lines


def table(predicted: Prediction) -> str:
    """Format predicted speeds as a table, one row for each way to compute misses."""
    moved, shared = predicted.moved, predicted.shared
    rows = [_row("none" if predicted.fits else "moved to the card", moved)]
    rows += [_row("--co-compute auto", shared)] if shared is not None else []
    header = ("misses", "tokens/s", "range", "TPOT", "TTFT", "miss ratio")
    return text_table(header, rows)


def recommendation(predicted: Prediction) -> list[str]:
    """Recommend `--co-compute auto` if tokens are surely faster with it; else say nothing."""
    from greenroom.plan.planner import surely_faster

    moved, shared = predicted.moved, predicted.shared
    if shared is None or not surely_faster(shared, moved):
        return []
    return [
        f"recommended: --co-compute auto, with {1 - shared.tpot / moved.tpot:.0%} less time a token"
        " in this prediction; the last bits of answers may differ from run to run. Compare both"
        " there: on an H200, where it was tried once, tokens took longer with it",
        "",
    ]


def _row(misses: str, estimate: Estimate) -> tuple[str, ...]:
    low, high = (show_number(1 / each) for each in (estimate.high, estimate.low))
    return (
        misses, show_number(1 / estimate.tpot), f"{low} to {high}", show_time(estimate.tpot),
        show_time(estimate.ttft), "-" if misses == "none" else f"{estimate.miss_ratio:.1%}",
    )  # fmt: skip


def as_json(
    model: str, card: Card, machine: Machine, predicted: Prediction, cards: int
) -> dict[str, Any]:
    """Return the object that `greenroom doctor --gpu --json` prints."""
    shared = predicted.shared
    return {
        "model": model, "gpu": card.name, "source": card.source, "predicted": True,
        "num_gpus": cards, "device_placement": predicted.placement.name if cards > 1 else None,
        "token_graph": predicted.graph, "token_in_pieces": predicted.pieces,
        "capacity": predicted.capacity, "host_capacity": predicted.host,
        "moved": predicted.moved.as_json(), "shared": shared and shared.as_json(),
        "machine": machine.as_json(),
    }  # fmt: skip
