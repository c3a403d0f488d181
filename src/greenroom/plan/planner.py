"""Planner: the best settings for a memory budget, and the least memory for a target TPOT.

Plain LRU and a run's default setting are always among the compared settings. The default is the one
that `greenroom tune` measured, or one that an earlier plan chose, or a quick plan
(plan/defaults.py). Another setting is chosen only if it is surely faster on the model's recorded
routing: by MARGIN, in a bootstrap over forward passes. A synthetic workload never overrides the
defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from greenroom.config import show_bytes
from greenroom.errors import UsageError
from greenroom.plan.budgets import marginal_slots, miss_tables
from greenroom.plan.configurator import TokenLatency
from greenroom.plan.estimate import Estimate, Estimator
from greenroom.plan.settings import (
    AUTO,
    DEFAULT,
    OFF,
    PLAIN,
    SCOPES,
    SPLITS,
    Setting,
    candidate_settings,
)
from greenroom.plan.sizing import CacheConfiguration, recorded_activity
from greenroom.trace import Trace, stream

MARGIN = 0.03  # of a token's time; a smaller gain is not worth another setting
LEVEL, DRAWS = 0.05, 400  # of the bootstrap
FINALISTS = 2  # settings without prefetching that are also tried with it
ALGORITHM_1_TOKENS = 2048  # of a recording, at half a millisecond each
SHARES = (0.06, 0.125, 0.18, 0.25, 0.35, 0.5, 0.65, 0.8, 1.0)  # of all experts, for the curve


@dataclass(frozen=True, slots=True)
class Target:
    """Result of a plan for a target time per output token (TPOT).

    seconds: the target TPOT
    least:   the estimate with the least memory that meets the target; None if no memory does
    nearest: the estimate that comes nearest to the target
    blocked: the reason why the memory budget does not meet the target; None if it does
    """

    seconds: float
    least: Estimate | None
    nearest: Estimate
    blocked: str | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan for one memory budget: the best setting, all compared settings, TPOT over memory.

    The fastest of the compared settings is first.
    """

    memory: int
    capacity: int
    best: Estimate
    overrides_default: bool  # `best` is surely faster than the default setting
    compared: tuple[Estimate, ...]
    curve: tuple[Estimate, ...]
    target: Target | None


def plan(
    estimator: Estimator,
    memory: int,
    target: float | None = None,
    default_setting: Callable[[int], tuple[Setting, bool]] = lambda capacity: (DEFAULT, False),
) -> Plan:
    """Plan a run within a memory budget, and the least memory for a target TPOT.

    `memory` is in bytes, `target` in seconds. `default_setting` takes a number of cache slots, and
    returns the default setting of a run with them and whether that setting was measured.
    BudgetError if the model does not fit, UsageError for a target that is not a positive time.
    """
    if target is not None and not 0 < target < float("inf"):
        raise UsageError(f"--target-tpot must be more than 0 and finite, got {target:g} s")
    capacity = estimator.model.slots(memory)
    default, measured = default_setting(capacity)
    compared = compare_settings(estimator, capacity, default)
    best, overrides = choose_setting(estimator, compared, default, may_override=not measured)
    points = memory_curve(estimator, best.setting, memory)
    target_result = None if target is None else reach_target(estimator, best, memory, target)
    return Plan(memory, capacity, best, overrides, compared, points, target_result)


def compare_settings(
    estimator: Estimator, capacity: int, default: Setting = DEFAULT
) -> tuple[Estimate, ...]:
    """Estimate the speed of candidate and default settings at one cache capacity, fastest first.

    Prefetching, splits and approximation are tried only with the fastest candidates.
    """
    if capacity >= estimator.model.experts:
        return (estimator.of(PLAIN, capacity),)
    estimates = [
        estimator.of(s, capacity) for s in candidate_settings() if estimator.fits(s, capacity)
    ]
    estimates.sort(key=lambda each: each.tpot)
    best = [replace(each.setting, prefetch=AUTO) for each in estimates[:FINALISTS]]
    further = [*best, DEFAULT, default, *_sized_settings(estimator, best[0], capacity)]
    if estimator.co_compute:
        further += [replace(each, co_compute=AUTO) for each in (PLAIN, best[0])]
    further += [
        each
        for each in _split_settings(estimator, best[0], capacity)
        if estimator.fits(each, capacity)
    ]
    if estimator.precision != OFF:
        lower = {"miss_precision": estimator.precision, "low_below": estimator.low_below}
        further += [replace(best[0], prefetch=ahead, **lower) for ahead in (OFF, AUTO)]  # type: ignore[arg-type]
    estimates += [estimator.of(setting, capacity) for setting in dict.fromkeys(further)]
    return tuple(sorted(estimates, key=lambda each: each.tpot))


def _sized_settings(estimator: Estimator, best: Setting, capacity: int) -> list[Setting]:
    """Make settings with layers' caches sized by marginal gain, if routing is recorded.

    The sizes come from the first half of the requests, so that they are not fitted to all of the
    routing on which settings are compared.
    """
    half = _first_half(estimator)
    if half is None or capacity < estimator.model.layers:
        return []
    slots = marginal_slots(miss_tables(stream(half, "runtime"), half.offsets), capacity)
    return [Setting(best.policy, ",".join(map(str, slots)), OFF)]


def _split_settings(estimator: Estimator, best: Setting, capacity: int) -> list[Setting]:
    """Make settings with split experts, if the model is packed in segments.

    One has equal shares for all layers, for each of SPLITS. Another has the layers' sizes and
    shares of MoEpic's Algorithm 1, computed from the first half of the recorded requests.
    """
    if not estimator.model.segments:
        return []
    candidates = [replace(best, scope="shared", split=split) for split in SPLITS]
    half = _first_half(estimator)
    if half is None or half.pass_prefill.all():
        return candidates
    latency = TokenLatency.of(estimator.costs, estimator.model.expert_bytes, half.top_k)
    chosen = CacheConfiguration.of(
        recorded_activity(half.head(ALGORITHM_1_TOKENS)), capacity, latency
    )
    if chosen.split is None:
        return candidates
    scope = ",".join(f"{budget:.4g}" for budget in chosen.scope)
    return [
        *candidates,
        replace(best, scope=scope, split=",".join(f"{r:.3g}" for r in chosen.split)),
    ]


def _first_half(estimator: Estimator) -> Trace | None:
    """Return the first half of a workload's requests; None if it is synthetic or too short."""
    trace = estimator.workload.traces[0]
    if not estimator.workload.recorded or trace.requests < 2:
        return None
    return trace.select(range(trace.requests // 2))


def choose_setting(
    estimator: Estimator,
    compared: tuple[Estimate, ...],
    default: Setting = DEFAULT,
    may_override: bool = True,
) -> tuple[Estimate, bool]:
    """Choose between the fastest compared setting and the default one.

    The fastest is chosen if it is surely faster on recorded routing and `may_override` is true.
    Returns the chosen setting's estimate, and whether it overrides the default.
    """
    now = next((each for each in compared if each.setting == default), compared[0])
    first = compared[0]
    if first is now or not estimator.workload.recorded or not may_override:
        return now, False
    return (first, True) if surely_faster(first, now) else (now, False)


def surely_faster(one: Estimate, other: Estimate) -> bool:
    """Test whether one setting takes at least MARGIN (3 %) less time than another.

    The test is a bootstrap over the decode passes of both estimates, at a level of 5 %. False if
    there are fewer than 16 passes.
    """
    n = min(one.gaps.size, other.gaps.size)
    if n < 16:
        return False
    draws = np.random.default_rng(0).integers(0, n, (DRAWS, n))
    ratios = one.gaps[:n][draws].sum(1) / other.gaps[:n][draws].sum(1)
    return bool(np.quantile(ratios, 1 - LEVEL) < 1 - MARGIN)


def memory_curve(estimator: Estimator, setting: Setting, memory: int) -> tuple[Estimate, ...]:
    """Estimate time per output token (TPOT) over memory budgets, for one setting.

    Its prefetching, split and approximation are left out. One of the budgets is `memory`, in bytes.
    """
    model, setting = estimator.model, _without_sizes(setting)
    sizes = {max(model.least_slots, int(share * model.experts)) for share in SHARES}
    sizes.add(model.slots(memory))
    reactive = replace(setting, prefetch=OFF, split=OFF, miss_precision=OFF, low_below=None)
    fits = [n for n in sorted(sizes) if setting.scope == "shared" or n >= model.layers]
    return tuple(estimator.of(reactive, n) for n in fits)


def _without_sizes(setting: Setting) -> Setting:
    """Replace a scope of slots by layer, which fits only one capacity, by `shared`."""
    return setting if setting.scope in SCOPES else replace(setting, scope="shared")


def default_curve(estimator: Estimator, available: int) -> tuple[Estimate, ...]:
    """Estimate time per output token (TPOT) over memory budgets, for the default setting.

    One of the budgets is the `available` memory, in bytes.
    """
    model = estimator.model
    return memory_curve(estimator, DEFAULT, max(available, model.least_memory))


def reach_target(estimator: Estimator, best: Estimate, memory: int, target: float) -> Target:
    """Find the least memory that meets a target time per output token (TPOT).

    The result also gives the reason if the budget does not meet the target. `memory` is the budget
    in bytes, `target` is in seconds. The search is a bisection over the number of cache slots,
    since more slots are never slower apart from noise.
    """
    model, setting = estimator.model, _without_sizes(best.setting)
    least = model.layers if setting.scope == "per-layer" else model.least_slots
    all_resident = estimator.of(setting, model.experts)
    if all_resident.tpot > target:
        blocked = (
            f"even with every expert in memory, a token takes"
            f" {all_resident.tpot * 1e3:.0f} ms to compute, so the processor is too slow"
        )
        return Target(target, None, all_resident, blocked)
    below, meets = least - 1, model.experts
    while meets - below > max(1, model.experts // 128):
        middle = (below + meets) // 2
        if estimator.of(setting, middle, bracket=False).tpot <= target:
            meets = middle
        else:
            below = middle
    smallest = estimator.of(setting, meets)
    if smallest.memory <= memory:
        return Target(target, smallest, smallest, None)
    reason = f"a token spends {best.stall:.0%} of its {best.tpot * 1e3:.0f} ms waiting for experts"
    remedy = f"{show_bytes(smallest.memory)} of memory would be enough"
    blocked = f"with {show_bytes(memory)} of memory {reason}: reading experts is too slow; {remedy}"
    return Target(target, smallest, replace(best, memory=memory), blocked)
