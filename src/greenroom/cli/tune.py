"""`greenroom tune MODEL`: measures the best settings, and stores the winner for later runs."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.cli.bench import left_out_of, prompts_of, run_entries, table
from greenroom.cli.early.checks import check_early
from greenroom.cli.options.fields import add_model, add_options, take
from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_json
from greenroom.cli.terminal.progress import model_progress
from greenroom.config import BenchmarkConfig, LoadConfig, changed_options, flag
from greenroom.errors import UsageError

if TYPE_CHECKING:
    from greenroom.hf.measure.entries import Entry
    from greenroom.plan.estimate import Estimator
    from greenroom.plan.settings import Setting

HELP = "measure the planned best settings of a model, and store the winner for later runs"
FEW = 2  # of a plan's best settings, besides plain LRU and the default
CHOSEN = (  # what is tuned
    "policy", "scope", "split", "prefetch", "predictor", "no_guard", "prefetch_rule",
)  # fmt: skip


def add_to(parser: Parser) -> None:
    add_model(parser)
    parser.add_argument(
        "--trace", metavar="FILE", type=Path,
        help="recorded routing of the model, from `greenroom trace record`, by which the"
        " settings to"
        " measure are chosen (default: the routing of earlier runs, or a synthetic workload)",
    )  # fmt: skip
    parser.add_argument(
        "--machine", metavar="FILE", default="auto",
        help="profile of this machine, from `greenroom doctor` (default: the stored profile, which"
        " is measured first if there is none)",
    )  # fmt: skip
    add_json(parser)
    add_options(parser, BenchmarkConfig, "measuring")
    add_options(parser, LoadConfig)
    parser.show("trace", "json")
    parser.set_defaults(seconds=180.0)


def main(args: argparse.Namespace) -> None:
    load, how = take(args, LoadConfig), take(args, BenchmarkConfig)
    for name in changed_options(load):
        if name in CHOSEN:
            raise UsageError(
                f"{flag(name)} is an option that `greenroom tune` chooses: leave it out, or measure"
                " it with `greenroom bench`"
            )
    if load.approximation() is not None:
        raise UsageError(
            "`greenroom tune` compares settings with the same output: leave out --miss-precision,"
            " --skip-below, --substitute-below and --cache-bias, or measure them with `greenroom"
            " bench`"
        )
    check_early(load)
    with model_progress(args.model) as progress:
        from greenroom.cli.estimate.estimator import described, estimator_of, workload_of
        from greenroom.cli.estimate.machine import machine_of
        from greenroom.hf.measure.entries import winner
        from greenroom.plan.settings import PLAIN

        model = described(args.model, load)
        machine, _ = machine_of(args.machine, progress)
        estimator, _ = estimator_of(model, machine, workload_of(args.trace, model), load)
        settings = candidates(estimator, capacity_of(load, model))
        entries = [_entry(setting, load) for setting in settings]
        harness = run_entries(args, load, how, entries, prompts_of(how), progress)
        progress.clear()
    plain = entries[settings.index(PLAIN)]
    if not plain.rounds:
        raise UsageError(f"{plain.name} could not be measured: {plain.skip_reason}")
    measured = [entry for entry in entries if entry.rounds]
    best = winner(measured, plain)
    where = store_winner(harness, load, model.fingerprint, measured, best, plain)
    rows = [entry.as_row(plain) for entry in measured]
    for line in left_out_of(entries):
        print(line, file=sys.stderr)
    if args.json:
        print(json.dumps({"winner": best.name, "stored": where and str(where), "rows": rows}))
        return
    print(table(rows, harness))
    limits = load.read_limit is not None or load.host_memory is not None
    why = "with --read-limit or --host-memory" if limits else "GREENROOM_LEARNED is off"
    stored = f"stored in {where}: later runs of this model with a similar cache use it"
    print(f"\nwinner: {best.name}; {stored if where else f'not stored ({why})'}")


def capacity_of(load: LoadConfig, model: Any) -> int:
    """Return the number of cache slots that --memory or --cache give, without loading the model."""
    from greenroom.config import Amount
    from greenroom.hf.memory.budget import budget_bytes

    if load.cache is None:
        return int(model.slots(budget_bytes(load.memory)))
    amount = Amount.parse(load.cache, "--cache")
    slots = amount.of(model.experts) if amount.share else amount.of(0) // model.slot_bytes
    return max(model.least_slots, min(int(slots), model.experts))


def candidates(estimator: Estimator, capacity: int) -> list[Setting]:
    """Return the settings that `greenroom tune` measures.

    They are plain LRU, the default setting, and the two fastest others of a plan for `capacity`
    cache slots.
    """
    from greenroom.plan.planner import compare_settings
    from greenroom.plan.settings import DEFAULT, PLAIN

    always = (PLAIN, DEFAULT)
    others = [e.setting for e in compare_settings(estimator, capacity) if e.setting not in always]
    return [*always, *others[:FEW]]


def _entry(setting: Setting, load: LoadConfig) -> Entry:
    from greenroom.hf.measure.entries import Entry
    from greenroom.plan.settings import OFF, PLAIN, SCOPES

    scope = setting.scope if setting.scope in SCOPES else "sizes by layer"
    name = "plain LRU" if setting == PLAIN else f"{setting.policy}, {scope}"
    name += ", prefetching" if setting.prefetch != OFF else ""
    if setting.split != OFF:
        name += f", split {'by layer' if ',' in setting.split else f'at {setting.split}'}"
    return Entry(name, replace(load, **setting.options()))


def store_winner(
    harness: Any,
    load: LoadConfig,
    fingerprint: str,
    entries: list[Entry],
    best: Entry,
    plain: Entry,
) -> Path | None:
    """Store the fastest setting and the measured rounds for later runs and plans.

    Returns the path of the written file. Nothing is stored, and None returned, with --read-limit or
    --host-memory, which later runs may not have, and with GREENROOM_LEARNED=off.
    """
    import numpy as np

    from greenroom.core.machine import machine_name
    from greenroom.hf.defaults import device_of
    from greenroom.plan.history.files import update_records
    from greenroom.plan.history.records import OPTIONS, Records, StoredSetting
    from greenroom.runtime.measure.bandwidth import host_facts

    if load.read_limit is not None or load.host_memory is not None:
        return None
    device = device_of(harness.setup)
    machine = machine_name(host_facts())
    options = {name: getattr(best.config, name) for name in OPTIONS}
    if options["split"] == "off":  # plans store no value for it either
        del options["split"]
    setting = StoredSetting(
        harness.capacity, options, "tune", float(np.mean(best.tpots)), float(np.mean(plain.tpots)),
        date.today().isoformat(), device,
    )  # fmt: skip

    def measured(records: Records) -> Records:
        records = records.with_setting(setting)
        if device != "cpu":  # plans calibrate the costs of the CPU alone
            return records
        size = harness.setup.catalog.all_experts_bytes // harness.experts
        for entry in entries:
            records = records.with_runs(tuple(entry.observed(size)))
        return records.with_load(harness.process_bytes) if harness.process_bytes else records

    return update_records(fingerprint, machine, measured)
