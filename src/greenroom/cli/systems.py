"""`--system` of `simulate`: each row of the table as cells of a sweep."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from greenroom.errors import UsageError

if TYPE_CHECKING:
    from greenroom.core.activity import Activity
    from greenroom.plan.systems import System
    from greenroom.sim.sweep import Row, Study
    from greenroom.trace import Trace

NAMES = (
    "mixtral-offloading, adapmoe, moe-infinity, promoe, moepic, pre-gated, hobbit, fate, hybrimoe,"
    " fiddler, llru, static, greenroom; options given beside it override its row"
)
HELP = f"named systems instead of policies: {NAMES}"
ONE = f"put the parts together as a paper does: {NAMES}"
STAND_IN = "noisy-oracle:1,accuracy=0.85"  # about what the papers report of the next layer's gate


def apply(args: argparse.Namespace) -> None:
    """Have a run take the options of `--system`, as far as the user gave no others. UsageError
    names the parts that are missing."""
    from greenroom.cli.options import given
    from greenroom.config import LoadConfig
    from greenroom.plan.systems import options, system

    known = LoadConfig.__dataclass_fields__
    mine = {name: value for name, value in given(args).items() if name in known}
    for name, value in options(system(args.system), mine, known).items():
        setattr(args, name, value)


@dataclass(frozen=True)
class Played:
    """How a system is simulated: several cells where its guard would choose among them; `notes`
    say what of it is not simulated, or by what instead; `both` that misses are computed on the host
    too."""

    policy: str
    prefetches: tuple[str, ...]
    both: bool = False
    notes: tuple[str, ...] = field(default=())


def played(args: argparse.Namespace, study: Study, row: System) -> Played:
    """A row over a trace, with what the user gave beside it. UsageError for options that cannot
    be right."""
    from greenroom.sim.sweep import OFF

    trace, both = study.trace, row.both and args.co_compute is None and can_share(study)
    notes = [
        what
        for option, what in row.parts().items()
        if option not in ("scope", "pin", "split")
        and getattr(args, option, None) is None
        and not (both and option == "co_compute")
    ]
    if row.split and args.split is None:
        notes += without_algorithm_1(args, study)
    policy = args.policy or row.policy
    if row.chosen and not args.policy and study.event_by_event:
        policy = "lru"  # of the scratch slots, as in a run: what was chosen stays by itself
    wanted = args.prefetch or row.prefetch
    prefetches: tuple[str, ...] = (OFF,)
    if args.machine is None:
        if wanted != OFF:
            notes.append("prefetching, which needs --machine")
    elif wanted != OFF:
        found = wanted if args.prefetch else recorded(trace, wanted)
        if found != wanted:
            notes.append(f"{wanted}, for which {found} stands in: the trace has no predictions")
        prefetches = (OFF, found) if row.guard else (found,)
    return Played(policy, prefetches, both, tuple(notes))


def without_algorithm_1(args: argparse.Namespace, study: Study) -> list[str]:
    """What of MoEpic's Algorithm 1 is not simulated, or by what instead."""
    if args.scope is not None:
        return ["split experts, since --scope is given and no --split with it"]
    if study.costs is None:
        return ["Algorithm 1, which needs --machine: sizes of layers by a dynamic programme stand"
                " in, and experts are whole"]  # fmt: skip
    if not can_split(study):
        return ["split experts, which have no host tier, are on one device and exact: Algorithm"
                " 1's budgets are of whole ones"]  # fmt: skip
    return []


def can_split(study: Study) -> bool:
    """Whether the simulator can cut the experts of this study in two."""
    return not study.host and study.devices == 1 and study.lesser is None


def can_share(study: Study) -> bool:
    """Whether misses can be shared out between two processors: host memory keeps experts, and
    somebody computes there."""
    return study.host > 0 and study.costs is not None and study.costs.host is not None


def chosen(study: Study, row: System, capacity: int) -> tuple[int, ...]:
    """What a row that chooses beforehand keeps: the experts asked for most in the trace, but for
    the slots that a step of one token needs. They are found on the trace that is simulated."""
    if not row.chosen:
        return ()
    import numpy as np

    asked = np.bincount(study.requests.pieces, minlength=int(study.trace.offsets[-1]))
    most = np.argsort(-asked, kind="stable")[: max(0, capacity - study.trace.top_k)]
    return tuple(np.sort(most).tolist())


def recorded(trace: Trace, prefetch: str) -> str:
    """A row's predictor, or what stands in for one that runs beside a model only."""
    from greenroom.predictors import AUTO, predictor
    from greenroom.sim.proactive import automatic, chosen

    if predictor(prefetch).kind is AUTO:
        return automatic(trace)
    try:
        chosen(trace, prefetch)
    except UsageError:
        return STAND_IN
    return prefetch


def divided(
    args: argparse.Namespace,
    study: Study,
    row: System,
    capacity: int,
    heard: Callable[[], Activity],
) -> tuple[Study, tuple[str, ...]]:
    """The study with a row's slots shared out as it says, unless the user said otherwise; experts
    split, where Algorithm 1 has them so; and what of that there is no room for.

    Sizes of a dynamic programme are found on the trace that is simulated, which flatters them a
    little; `heard` gives what Algorithm 1 looks at.
    """
    from greenroom.core.scope import least_capacity
    from greenroom.plan.configurator import Latency
    from greenroom.plan.recorded import Configured, programmed
    from greenroom.sim.proactive import parts_of

    if args.scope is not None:
        return study, ()
    if row.sizes is None:
        return replace(study, scope=row.scope), ()
    if row.sizes == "dp" or study.costs is None:
        offsets = study.trace.offsets
        found = programmed(study.requests, offsets, capacity, reset=study.reset)
        return replace(study, scope=found), ()
    latency = Latency.of(study.costs, study.expert_bytes, study.trace.top_k)
    chosen = Configured.of(heard(), capacity, latency)
    whole = replace(study, scope=chosen.scope)
    if chosen.split is None or args.split is not None or not can_split(study):
        return whole, ()
    pieces = parts_of(study.trace, study.expert_bytes, chosen.split)
    if capacity < least_capacity(pieces, chosen.scope):
        return whole, (f"Algorithm 1's splits, for which {capacity} slots are too few",)
    return replace(whole, split=chosen.split), ()


def simulated(
    args: argparse.Namespace,
    study: Study,
    capacities: list[int],
    go: Any,
    before: Trace | None = None,
) -> list[Row]:
    """A row of the result for each system and capacity; with a guard the faster of its cells.

    Algorithm 1 looks at `before`, with what the row's predictor says of it; without it the trace
    that is simulated stands in for what a run would have counted until then.
    """
    from greenroom.plan.recorded import foreseen
    from greenroom.plan.systems import systems
    from greenroom.sim.sweep import Cell

    rows: list[Row] = []
    for row in systems(args.system):
        how = played(args, study, row)
        heard = cache(partial(foreseen, before or study.trace, how.prefetches[-1]))
        for capacity in capacities:
            own, less = divided(args, study, row, capacity, heard)
            cells = [Cell(how.policy, capacity, args.pin, each) for each in how.prefetches]
            own = replace(own, co_compute=study.co_compute or how.both)
            if study.event_by_event and how.policy == "lru":
                own = replace(own, stay=chosen(study, row, capacity))
            found = go(own, cells)
            best = min(found, key=lambda each: each.get("tpot_mean_s") or each["misses"])
            shares = {"split": list(own.split)} if isinstance(own.split, tuple) else {}
            rows.append({"system": row.name, **best, **shares, "without": [*how.notes, *less]})
    return rows
