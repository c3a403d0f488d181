"""`greenroom list [MODEL]`: lists the models on this machine, or a repository's quantisations."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from greenroom.cli.estimate.estimator import described, estimator_of, workload_of
from greenroom.cli.estimate.machine import default_profile, profile
from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_json
from greenroom.cli.terminal.progress import Progress, quiet
from greenroom.config import LoadConfig, show_bytes
from greenroom.errors import GreenroomError, UsageError
from greenroom.sim.table import show_number, text_table

if TYPE_CHECKING:
    from greenroom.core.machine import Machine
    from greenroom.hf.checkpoint.hub.cached import CachedModel

LONGEST_REMARK = 100  # characters; the commands that open a model print the whole error
HELP = "list the models on this machine: size, whether they fit its memory, and how fast"


@dataclass(slots=True)
class Row:
    """One line of the list; bytes and seconds are None if unknown."""

    name: str
    format: str
    nbytes: int
    total_bytes: int | None
    path: Path | None
    least_memory: int | None = None
    whole_memory: int | None = None
    fits: bool | None = None
    tpot_s: float | None = None
    problem: str = ""

    def as_json(self) -> dict[str, Any]:
        row = {name: getattr(self, name) for name in self.__slots__}
        return {**row, "path": self.path and str(self.path), "complete": self.path is not None}


def add_to(parser: Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?",
        help="a GGUF repository on the hub, whose quantisations are listed with their sizes"
        " (default: the models in the hub's cache and in this folder, and demo)",
    )  # fmt: skip
    parser.add_argument(
        "--no-plan", action="store_true",
        help="list names and sizes alone, without memory and speed",
    )  # fmt: skip
    parser.add_argument(
        "--gpus", action="store_true",
        help="list the graphics cards that `greenroom doctor MODEL --gpu` knows, and nothing else",
    )  # fmt: skip
    add_json(parser, "one JSON list")


def main(args: argparse.Namespace) -> None:
    if args.gpus:
        return list_cards(args)
    with Progress("looking for models") as progress:
        if args.model is not None:
            return list_hub(args, progress)
        rows = [*local_rows(), *hub_rows()]
        machine = profile("auto") if default_profile().exists() else None
        if not args.no_plan:
            quiet()
            for row in rows:
                if row.path is not None:
                    progress.say(f"{row.name}: planning")
                    estimate(row, machine)
    if args.json:
        print(json.dumps([row.as_json() for row in rows]))
        return None
    print(text_table(
        ("model", "format", "size", "memory", "tokens/s", "remarks"),
        [(row.name, row.format, show_bytes(row.nbytes), *cells(row)) for row in rows],
        left=(0, 1, 5),
    ))  # fmt: skip
    if machine is None and not args.no_plan:
        print("tokens/s need a profile of this machine: greenroom doctor --quick", file=sys.stderr)
    return None


def list_cards(args: argparse.Namespace) -> None:
    """Print the table of graphics cards, from data sheets."""
    from greenroom.plan.cards.table import load_cards

    if args.model is not None or args.no_plan:
        raise UsageError("--gpus lists graphics cards alone: leave out MODEL and --no-plan")
    if args.json:
        print(json.dumps([{**asdict(card), "pcie": str(card.pcie)} for card in load_cards()]))
        return
    products = [
        ["-" if each is None else f"{each / 1e12:g}" for each in (card.bf16, card.fp16, card.fp8)]
        for card in load_cards()
    ]
    print(text_table(
        ("graphics card", "memory", "GB/s", "PCIe", "bf16 TFLOPS", "fp16", "fp8"),
        [(card.name, show_bytes(card.memory), f"{card.bandwidth / 1e9:,g}", str(card.pcie), *each)
         for card, each in zip(load_cards(), products, strict=True)],
    ))  # fmt: skip


def cells(row: Row) -> tuple[str, str, str]:
    """Format a row's memory, speed and remarks."""
    if row.path is None:
        share = f"{row.nbytes / row.total_bytes:.0%} of it: " if row.total_bytes else ""
        return "", "", f"incomplete, {share}greenroom pull {row.name}"
    if row.least_memory is None or row.whole_memory is None:
        return "", "", shorten(row.problem, LONGEST_REMARK, placeholder=" ...")
    bounds = dict.fromkeys(map(show_bytes, (row.least_memory, row.whole_memory)))
    memory = " to ".join(bounds)
    remark = "fits" if row.fits else "needs more memory than is free"
    return memory, show_number(1 / row.tpot_s) if row.tpot_s else "", remark


def local_rows() -> list[Row]:
    """List the demo model, and the models in the working folder."""
    from greenroom.hf.checkpoint.pack.reading import is_pack
    from greenroom.hf.checkpoint.resolve import find_local

    rows = []
    for name in ("demo", *sorted(path.name for path in Path().iterdir())):
        path = Path(name)
        is_model = path.suffix == ".gguf" or is_pack(path) or (path / "config.json").is_file()
        if name != "demo" and not is_model:
            continue
        try:
            path, problem = (find_local(name) or path).absolute(), ""
        except GreenroomError as error:
            problem = str(error)
        files = [path] if path.is_file() else [each for each in path.iterdir() if each.is_file()]
        kind = "GGUF" if path.suffix == ".gguf" else "pack" if is_pack(path) else "safetensors"
        size = sum(each.stat().st_size for each in files)
        rows.append(Row(name, kind, size, size, path, problem=problem))
    return rows


def hub_rows() -> list[Row]:
    """List the models in the cache of the hub."""
    from greenroom.hf.checkpoint.hub.cached import cached_models

    def row(model: CachedModel) -> Row:
        return Row(model.name, model.format, model.nbytes, model.total, model.path)

    return [row(model) for model in cached_models()]


def estimate(row: Row, machine: Machine | None) -> None:
    """Add the memory that a model needs, and its planned speed, to its row."""
    from greenroom.hf.memory.budget import budget_bytes
    from greenroom.plan.quick import quick_plan

    config = LoadConfig()
    try:
        model = described(str(row.path), config)
        row.least_memory, row.whole_memory = model.least_memory, model.memory(model.experts)
        memory = budget_bytes("auto")
        row.fits = memory >= model.least_memory
        if machine is not None and row.fits:
            workload, slots = workload_of(None, model), model.slots(memory)
            setting = quick_plan(workload.traces[0], slots).setting
            estimator, _ = estimator_of(model, machine, workload, config)
            row.tpot_s = estimator.of(setting, slots, bracket=False).tpot
    except GreenroomError as error:
        row.problem = str(error).removeprefix(f"{row.path}: ")


def list_hub(args: argparse.Namespace, progress: Progress) -> None:
    """Print the quantisations of a repository on the hub."""
    from greenroom.hf.checkpoint.hub.cached import cached_models
    from greenroom.hf.checkpoint.hub.errors import hub_errors, unreachable
    from greenroom.hf.checkpoint.hub.quantisations import quantisations, select
    from greenroom.hf.checkpoint.hub.repository import ask_hub, hub_name, reachable

    if not reachable():
        raise unreachable(args.model)
    with hub_errors(args.model):
        name = hub_name(args.model)
        repository = ask_hub(name)
        choices = [(f"{name.repository}:{each.label}", each.nbytes)
                   for each in quantisations(repository.sizes)]  # fmt: skip
        if not choices:
            weights = select(args.model, name, repository.sizes).weights
            choices = [(name.repository, sum(repository.sizes[path] for path in weights))]
    cached = {model.name: model for model in cached_models()}
    progress.clear()
    if args.json:
        print(json.dumps([
            {"name": each, "nbytes": size, "here": each in cached and cached[each].path is not None}
            for each, size in choices
        ]))  # fmt: skip
        return
    states = [
        "" if each not in cached else "here" if cached[each].path else "a part is here"
        for each, _ in choices
    ]
    print(text_table(
        ("model", "size", "on this machine"),
        [(each, show_bytes(size), s) for (each, size), s in zip(choices, states, strict=True)],
    ))  # fmt: skip
