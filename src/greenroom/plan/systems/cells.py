"""Named systems in a simulation: each row of the table as cells of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from greenroom.core.activity import Activity
from greenroom.core.cache.scope import least_capacity
from greenroom.core.config.scheduler import option_names, with_options
from greenroom.errors import UsageError
from greenroom.plan.configurator import TokenLatency
from greenroom.plan.sizing import CacheConfiguration, predicted_activity, slots_with_fewest_misses
from greenroom.plan.systems.table import System
from greenroom.predictors import AUTO, OFF, predictor
from greenroom.sim.event_driven import split_pieces
from greenroom.sim.foresight import automatic_predictor, resolve_predictor
from greenroom.sim.study import Cell, Row, Study
from greenroom.trace import Trace

STAND_IN = "noisy-oracle:1,accuracy=0.85"  # about what the papers report of the next layer's gate

UserOptions = Mapping[
    str, Any
]  # options of `simulate`; one that is missing or None is as the row has it


def simulate_systems(
    rows: Sequence[System],
    user_options: UserOptions,
    study: Study,
    capacities: Sequence[int],
    go: Callable[[Study, list[Cell]], list[Row]],
    before: Trace | None = None,
) -> list[Row]:
    """A row of the result for each system and capacity; with a guard the faster of its cells.

    `go` runs cells. Algorithm 1 looks at `before`, with the predictions of the row's predictor;
    without it the trace that is simulated stands in for what a run would have counted until then.
    UsageError for options that cannot be right.
    """
    results: list[Row] = []
    for row in rows:
        policy, prefetches, both, notes = conditions(user_options, study, row)
        activity = cache(partial(predicted_activity, before or study.trace, prefetches[-1]))
        for capacity in capacities:
            sized, less = sized_study(user_options, study, row, capacity, activity)
            if both:
                sized = replace(sized, config=with_options(sized.config, co_compute="auto"))
            if row.chosen and study.event_by_event and policy == "lru":
                sized = replace(sized, stay=most_used(study, capacity))
            pin = user_options.get("pin") or "step"
            cells = [Cell(policy, capacity, pin, each) for each in prefetches]
            best = min(go(sized, cells), key=lambda each: each.get("tpot_mean_s") or each["misses"])
            shares = {"split": list(sized.split)} if isinstance(sized.split, tuple) else {}
            results.append({"system": row.name, **best, **shares, "without": [*notes, *less]})
    return results


def conditions(
    user_options: UserOptions, study: Study, row: System
) -> tuple[str, tuple[str, ...], bool, list[str]]:
    """How a system is simulated, with the options that are given beside it: its policy, its
    predictors (several, where its guard would choose among them), whether misses are computed where
    they are, and notes of what is not simulated, or by what instead.
    """
    both = row.both and user_options.get("co_compute") is None and can_share(study)
    notes = [
        what
        for option, what in row.parts().items()
        if option not in ("scope", "pin", "split")
        and user_options.get(option) is None
        and not (both and option == "co_compute")
    ]
    if row.split and user_options.get("split") is None:
        notes += without_algorithm_1(user_options, study)
    policy = user_options.get("policy") or row.policy
    if row.chosen and not user_options.get("policy") and study.event_by_event:
        policy = "lru"  # of the scratch slots, as in a run: what was chosen stays by itself
    prefetch = user_options.get("prefetch") or row.prefetch
    prefetches: tuple[str, ...] = (OFF,)
    if prefetch != OFF and study.costs is None:
        notes.append("prefetching, which needs --machine")
    elif prefetch != OFF:
        replayable = (
            prefetch
            if user_options.get("prefetch")
            else replayable_predictor(study.trace, prefetch)
        )
        if replayable != prefetch:
            notes.append(
                f"{prefetch}, for which {replayable} stands in: the trace has no predictions"
            )
        prefetches = (OFF, replayable) if row.guard else (replayable,)
    return policy, prefetches, both, notes


def without_algorithm_1(user_options: UserOptions, study: Study) -> list[str]:
    """What of MoEpic's Algorithm 1 is not simulated, or by what instead."""
    if user_options.get("scope") is not None:
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
    return not study.host and study.devices == 1 and study.approximation is None


def can_share(study: Study) -> bool:
    """Whether misses can be shared out between two processors: there is such an option, host
    memory keeps experts, and somebody computes there."""
    available = "co_compute" in option_names()
    return available and study.host > 0 and study.costs is not None and study.costs.host is not None


def most_used(study: Study, capacity: int) -> tuple[int, ...]:
    """The experts asked for most in the trace that is simulated, but for the slots that a step of
    one token needs."""
    counts = np.bincount(study.requests.pieces, minlength=int(study.trace.offsets[-1]))
    most = np.argsort(-counts, kind="stable")[: max(0, capacity - study.trace.top_k)]
    return tuple(np.sort(most).tolist())


def replayable_predictor(trace: Trace, prefetch: str) -> str:
    """A row's predictor, or what stands in for one that runs beside a model only."""
    if predictor(prefetch).kind is AUTO:
        return automatic_predictor(trace)
    try:
        resolve_predictor(trace, prefetch)
    except UsageError:
        return STAND_IN
    return prefetch


def sized_study(
    user_options: UserOptions,
    study: Study,
    row: System,
    capacity: int,
    activity: Callable[[], Activity],
) -> tuple[Study, tuple[str, ...]]:
    """The study with a row's slots shared out as it says, unless the user said otherwise; experts
    split, where Algorithm 1 has them so; and what of that there is no room for.

    Sizes of a dynamic programme are found on the trace that is simulated, which flatters them a
    little; `activity` gives what Algorithm 1 looks at.
    """
    if user_options.get("scope") is not None:
        return study, ()
    if row.sizes is None:
        return replace(study, scope=row.scope), ()
    if row.sizes == "dp" or study.costs is None:
        offsets = study.trace.offsets
        sizes = slots_with_fewest_misses(study.requests, offsets, capacity, reset=study.reset)
        return replace(study, scope=sizes), ()
    latency = TokenLatency.of(study.costs, study.expert_bytes, study.trace.top_k)
    best = CacheConfiguration.of(activity(), capacity, latency)
    unsplit = replace(study, scope=best.scope)
    if best.split is None or user_options.get("split") is not None or not can_split(study):
        return unsplit, ()
    pieces = split_pieces(study.trace, study.expert_bytes, best.split)
    if capacity < least_capacity(pieces, best.scope):
        return unsplit, (f"Algorithm 1's splits, for which {capacity} slots are too few",)
    return replace(unsplit, split=best.split), ()
