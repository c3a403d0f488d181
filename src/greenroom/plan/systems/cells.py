"""Simulation of published systems for MoE inference on a recorded trace.

Each system of the table is simulated as cells (a policy at a capacity) of a sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from greenroom.core.activity import Activity
from greenroom.core.cache.scope import least_capacity
from greenroom.core.config.scheduler import option_names, with_options
from greenroom.core.cost import Costs
from greenroom.core.transfers.tiers import least_host_slots
from greenroom.errors import UsageError
from greenroom.plan.configurator import Division, TokenLatency
from greenroom.plan.sizing import (
    CacheConfiguration,
    predicted_activity,
    slots_with_fewest_misses,
)
from greenroom.plan.systems.table import System
from greenroom.predictors import AUTO, AUTOMATIC, OFF, predictor
from greenroom.predictors.helpers.kind import ALL, WIDTH
from greenroom.sim.event_driven import split_pieces
from greenroom.sim.foresight import resolve_predictor
from greenroom.sim.study import Cell, Row, Study
from greenroom.trace import Trace, stream

ALL_RANKS = f",{WIDTH.name}={ALL}"

UserOptions = Mapping[str, Any]  # options of `simulate`; the row decides what is missing or None


def simulate_systems(
    rows: Sequence[System],
    user_options: UserOptions,
    study: Study,
    capacities: Sequence[int],
    run_cells: Callable[[Study, list[Cell]], list[Row]],
    earlier: Trace | None = None,
) -> list[Row]:
    """Simulate each published system at each cache capacity; return a result for each pair.

    rows:         the systems
    user_options: options of `greenroom simulate`, which replace the options of the systems
    study:        the trace to simulate, and the machine
    run_cells:    simulates cells, and returns the results. A system that prefetches only while
                  that is faster has two cells, and the faster one counts
    earlier:      earlier trace of the model. Policies and predictors have learned from it; layer
                  sizes, splits and preselected experts are computed from it (default: they are
                  computed from the simulated trace, and nothing is learned before)

    UsageError for impossible options.
    """
    results: list[Row] = []
    past = (
        study
        if earlier is None
        else replace(study, trace=earlier, requests=stream(earlier, study.order))
    )
    if earlier is not None and study.costs is not None:
        study = replace(study, history=earlier)
    for row in rows:
        policy, prefetches, co_compute, notes = conditions(user_options, study, row)
        activity = cache(partial(predicted_activity, past.trace, prefetches[-1]))
        for capacity in capacities:
            sized, split_notes = sized_study(user_options, study, row, capacity, past, activity)
            if co_compute:
                sized = replace(sized, config=with_options(sized.config, co_compute="auto"))
            if prefetches[-1] != OFF and not user_options.get("prefetch_rule"):
                sized = replace(sized, config=with_options(sized.config, prefetch_rule=row.rule))
            if row.preselected and study.needs_events and policy == "lru":
                sized = replace(sized, stay=most_used(past, capacity))
            pin = user_options.get("pin") or "step"
            cells = [Cell(policy, capacity, pin, each) for each in prefetches]
            best = min(
                run_cells(sized, cells), key=lambda each: each.get("tpot_mean_s") or each["misses"]
            )
            shares = {"split": list(sized.split)} if isinstance(sized.split, tuple) else {}
            results.append(
                {"system": row.name, **best, **shares, "without": [*notes, *split_notes]}
            )
    return results


def conditions(
    user_options: UserOptions, study: Study, row: System
) -> tuple[str, tuple[str, ...], bool, list[str]]:
    """Decide how to simulate a published system: (policy, predictors, co-computing, notes).

    The user's options take precedence over the system's own. There are two predictors, `off` and
    another, if a run would prefetch only while that is faster. The notes name parts of the system
    that are not simulated, and what replaces them.
    """
    co_compute = row.co_compute and user_options.get("co_compute") is None and can_co_compute(study)
    notes = [
        what
        for option, what in row.parts().items()
        if option not in ("scope", "pin", "split")
        and user_options.get(option) is None
        and not (co_compute and option == "co_compute")
    ]
    if row.split and user_options.get("split") is None:
        notes += algorithm_1_notes(user_options, study)
    policy = user_options.get("policy") or row.policy
    if row.preselected and not user_options.get("policy") and study.needs_events:
        policy = "lru"  # for the scratch slots, as in a run: the chosen set is pinned
    prefetch = user_options.get("prefetch") or row.prefetch
    prefetches: tuple[str, ...] = (OFF,)
    if prefetch != OFF and study.costs is None:
        notes.append("prefetching, which needs --machine")
    elif prefetch != OFF:
        replayable, lacking = prefetch, ""
        if not user_options.get("prefetch"):
            replayable, lacking = replayable_predictor(study.trace, prefetch, row.distance)
        if lacking:
            notes.append(
                f"{prefetch}, which {replayable} replaces, since the trace has no {lacking}"
            )
        prefetches = (OFF, replayable) if row.guard else (replayable,)
    return policy, prefetches, co_compute, notes


def algorithm_1_notes(user_options: UserOptions, study: Study) -> list[str]:
    """Return notes on parts of MoEpic's Algorithm 1 that are not simulated.

    A note says what replaces the part. The list is empty if all parts are simulated.
    """
    if user_options.get("scope") is not None:
        return ["split experts, since --scope is given without --split"]
    if study.costs is None:
        return ["Algorithm 1, which needs --machine: a dynamic programme sizes the layers' caches"
                " instead, and experts are not split"]  # fmt: skip
    if not can_split(study):
        return ["split experts, which work only without --devices, --co-compute and approximated"
                " misses: Algorithm 1's budgets are used for unsplit experts"]  # fmt: skip
    return []


def can_split(study: Study) -> bool:
    """Check that a study allows split experts.

    They need one device, experts that only this device computes, and exact misses.
    """
    one_processor = study.devices == 1 and not study.config.uses_host()
    return one_processor and study.approximation is None


def loading_costs(study: Study) -> Costs:
    """Return the costs of loading an expert, for MoEpic's latency model.

    If host memory holds all experts, they are loaded from there, as in the paper.
    """
    assert study.costs is not None
    in_host = study.host >= int(study.trace.offsets[-1])
    return replace(study.costs, links=study.costs.links[-1:]) if in_host else study.costs


def can_co_compute(study: Study) -> bool:
    """Check that the host's processor can compute missing experts in a simulation.

    The simulation needs experts in host memory, and the costs of a processor there.
    """
    available = "co_compute" in option_names()
    return available and study.host > 0 and study.costs is not None and study.costs.host is not None


def most_used(study: Study, capacity: int) -> tuple[int, ...]:
    """List a trace's most requested experts, as many as cache slots allow.

    The ids are ascending. The slots that one token needs in one layer are left free.
    """
    counts = np.bincount(study.requests.pieces, minlength=int(study.trace.offsets[-1]))
    most = np.argsort(-counts, kind="stable")[: max(0, capacity - study.trace.top_k)]
    return tuple(np.sort(most).tolist())


def replayable_predictor(trace: Trace, prefetch: str, distance: int = 1) -> tuple[str, str]:
    """Return a system's predictor, or one that can be replayed on a trace instead.

    Returns (name, what the trace lacks for the system's own predictor, or ""). A noisy oracle with
    the accuracies of the demo model replaces a predictor that needs a running model. A ranking of
    all experts is replaced by the recorded ranks of the same predictor, or by a noisy oracle that
    ranks all experts. `distance` is how many layers ahead a trained predictor predicts, as a
    run reads from the predictor's file. ProMoE's predictor predicts a token's first layers after
    its layer 0.
    """
    choice = predictor(prefetch)
    if choice.kind is AUTO:  # a run would take the first
        return replayable_predictor(trace, AUTOMATIC[0])
    if "token_ids" in choice.kind.needs and trace.token_ids is None:
        return f"markov:{choice.distance}", "token ids"
    narrower = prefetch.removesuffix(ALL_RANKS)
    for name in dict.fromkeys((prefetch, narrower)):
        with suppress(UsageError):
            resolve_predictor(trace, name)
            return name, "" if name == prefetch else "ranks of all experts"
    name, width = choice.kind.name, prefetch[len(narrower) :]
    ahead = min(choice.distance or distance, trace.layers)
    return f"noisy-oracle:{ahead},like={name}{width}", "predictions of it"


def sized_study(
    user_options: UserOptions,
    study: Study,
    row: System,
    capacity: int,
    past: Study,
    activity: Callable[[], Activity],
) -> tuple[Study, tuple[str, ...]]:
    """Size the simulated cache of each layer as a published system does: (study, notes).

    The user's `scope` takes precedence. MoEpic's Algorithm 1, which reads the counts of `activity`,
    also splits experts; a note says if there are too few slots for that. The dynamic programme of
    other systems finds sizes on the trace of `past`; those of the simulated trace itself would be
    slightly too good.
    """
    if user_options.get("scope") is not None:
        return study, ()
    if row.sizes is None:
        return replace(study, scope=row.scope), ()
    if row.sizes == "dp" or study.costs is None:
        offsets = study.trace.offsets
        sizes = slots_with_fewest_misses(past.requests, offsets, capacity, reset=study.reset)
        return replace(study, scope=sizes), ()
    latency = TokenLatency.of(loading_costs(study), study.expert_bytes, study.trace.top_k)
    best = CacheConfiguration.of(activity(), capacity, latency)
    division = Division.of(capacity, latency, study.trace.layers, None)
    unsplit = replace(study, scope=best.scope, tau=study.config.tau, divide=division)
    if best.split is None or user_options.get("split") is not None or not can_split(study):
        return unsplit, ()
    pieces = split_pieces(study.trace, study.expert_bytes, best.split)
    if capacity < least_capacity(pieces, best.scope):
        return unsplit, (f"Algorithm 1's splits, which need more than {capacity} slots",)
    if study.host and study.host < (least := least_host_slots(pieces)):
        return unsplit, (f"Algorithm 1's splits, which need host memory for {least} experts",)
    assert pieces.split is not None
    divide = Division.of(capacity, latency, study.trace.layers, pieces.split)
    return replace(unsplit, split=best.split, divide=divide), ()
