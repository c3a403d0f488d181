"""Estimates, choices, curves and targets over a small model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from greenroom.core.cost import Link, Work
from greenroom.errors import BudgetError, UsageError
from greenroom.plan import estimate, planner
from greenroom.plan.configurator import LayerAllocation
from greenroom.plan.estimate import BAND, UNMEASURED, Estimate, Estimator
from greenroom.plan.page import plan_page, target_message
from greenroom.plan.planner import (
    Plan,
    choose_setting,
    compare_settings,
    default_curve,
    plan,
    reach_target,
    surely_faster,
)
from greenroom.plan.settings import AUTO, DEFAULT, OFF, PLAIN, SPLITS, Setting, candidate_settings
from greenroom.plan.workload import Workload, recorded_workload, synthetic_workload
from greenroom.policies import policy
from greenroom.sim.event_driven import EventOptions, simulate_events
from greenroom.sim.timed import time_trace
from greenroom.trace import Trace, stream
from tests.options import needs_option
from tests.plan.models import COSTS, MIB, MODEL, trace


@cache
def workload() -> Workload:
    return recorded_workload(trace(), MODEL, "it")


@cache
def estimator(measured: bool = True) -> Estimator:
    return Estimator(MODEL, COSTS, workload(), measured=measured)


@cache
def example_plan() -> Plan:
    return plan(estimator(), MODEL.memory(24), 0.1)


def test_an_estimate_is_what_the_simulator_says():
    estimated = estimator().of(PLAIN, 24)
    recorded = workload().traces[0]
    ran = time_trace(recorded, stream(recorded, "runtime"), 24, policy("lru"), COSTS, MIB)
    assert estimated.tpot == pytest.approx(ran.gaps.mean())
    assert (estimated.low, estimated.high) == pytest.approx(
        (estimated.tpot * (1 - BAND), estimated.tpot * (1 + BAND))
    )
    assert estimated.miss_ratio == ran.misses / ran.requests
    assert estimated.ttft == pytest.approx(np.median(ran.ttft))
    assert estimated.token_bytes == pytest.approx(ran.bytes_moved / recorded.tokens)


def test_ranges_are_wider_where_nothing_was_measured_or_recorded():
    narrow, wide = (estimator(flag).of(PLAIN, 24) for flag in (True, False))
    assert wide.high == pytest.approx(wide.tpot * (1 + UNMEASURED))
    assert narrow.high < wide.high
    guessed = Estimator(MODEL, COSTS, synthetic_workload(MODEL)).of(PLAIN, 24)
    assert guessed.low < guessed.tpot * (1 - UNMEASURED)
    assert guessed.high > guessed.tpot * (1 + UNMEASURED)


def test_everything_in_memory_has_one_setting():
    estimated = estimator().of(DEFAULT, MODEL.experts)
    assert estimated.setting == PLAIN
    assert estimated.tpot == pytest.approx(4 * (2e-3 + 2 * 1e-3), rel=0.35)  # and cold misses
    assert compare_settings(estimator(), MODEL.experts) == (estimated,)


def test_a_guarded_predictor_never_costs_time():
    guarded, still = (estimator().of(replace(DEFAULT, prefetch=p), 24) for p in ("auto", OFF))
    assert guarded.tpot <= still.tpot
    slow = replace(COSTS, links=(Link(MIB / 100e-3, 0.0, 2),))  # saturated: nothing can be gained
    busy = Estimator(MODEL, slow, workload(), measured=True)
    guarded, still = (busy.of(replace(DEFAULT, prefetch=p), 16) for p in ("auto", OFF))
    assert guarded.tpot == pytest.approx(still.tpot, rel=0.02)


def test_predictors_by_name():
    assert estimator().of(Setting("lru", "shared", "oracle"), 24).tpot < (
        estimator().of(PLAIN, 24).tpot
    )
    with pytest.raises(UsageError, match="needs a running model"):
        estimator().of(Setting("lru", "shared", "next-gate"), 24)


def test_what_is_compared():
    estimated = example_plan().compared
    assert {PLAIN, DEFAULT, *candidate_settings()} <= {each.setting for each in estimated}
    assert [each.tpot for each in estimated] == sorted(each.tpot for each in estimated)
    small = compare_settings(estimator(), 3)  # fewer slots than layers: no cache for each
    assert {each.setting.scope for each in small} == {"shared"}


def test_sizes_of_layers_are_among_them_where_routing_is_recorded():
    (sized,) = [e.setting for e in example_plan().compared if "," in e.setting.scope]
    slots = [int(number) for number in sized.scope.split(",")]
    assert len(slots) == MODEL.layers
    assert sum(slots) == 24
    guessed = compare_settings(Estimator(MODEL, COSTS, synthetic_workload(MODEL)), 24)
    assert not any("," in each.setting.scope for each in guessed)


def test_splits_are_among_them_where_experts_are_packed_for_it():
    packed = Estimator(replace(MODEL, segments=True), COSTS, workload(), measured=True)
    estimated = {e.setting.split: e for e in compare_settings(packed, 24) if e.setting.split != OFF}
    assert set(estimated) == set(SPLITS)
    assert "--split 0.5" in estimated["0.5"].setting.flags()
    recorded = workload().traces[0]
    first = estimate._tokens_until(recorded, estimate.EVENT_PASSES)
    still = packed.of(replace(estimated["0.5"].setting, prefetch=OFF), 24)
    part = recorded.head(first)
    played = simulate_events(
        part, stream(part, "runtime"), 24, policy(estimated["0.5"].setting.policy), COSTS, MIB, OFF,
        EventOptions(split=0.5),
    )  # fmt: skip
    assert still.gaps[: played.times.gaps.size].tolist() == played.times.gaps.tolist()
    assert {e.setting.split for e in example_plan().compared} == {OFF}


def test_algorithm_1_is_among_them_where_it_cuts(monkeypatch: pytest.MonkeyPatch):
    """What it makes of the first half of the recording, as options of a run."""
    half = trace().select(range(3))
    example_plan = [
        LayerAllocation(6.0, 8, share, 1.0, 0.0, 0.0) for share in (0.75, 0.5, 1.0, 0.75)
    ]
    calls = []

    def chosen(layers, budget, latency):
        calls.append((len(layers), budget, int(layers[0].top_k)))
        return example_plan

    monkeypatch.setattr("greenroom.plan.sizing.configure", chosen)
    packed = Estimator(replace(MODEL, segments=True), COSTS, workload(), measured=True)
    *alike, recorded = planner._split_settings(packed, DEFAULT, 24)
    assert [each.split for each in alike] == list(SPLITS)
    assert recorded == replace(DEFAULT, scope="6,6,6,6", split="0.75,0.5,1,0.75")
    assert packed.fits(recorded, 24)
    assert packed.of(replace(recorded, prefetch=OFF), 24).tpot > 0
    assert calls == [(half.layers, 24.0, MODEL.top_k)]
    example_plan[:] = [replace(each, ratio=0.99) for each in example_plan]  # nothing is cut
    assert planner._split_settings(packed, DEFAULT, 24) == alike
    guessed = Estimator(replace(MODEL, segments=True), COSTS, synthetic_workload(MODEL))
    assert planner._split_settings(guessed, DEFAULT, 24) == alike


def test_what_has_no_room_for_its_bottoms_is_left_out():
    packed = Estimator(replace(MODEL, segments=True), COSTS, workload(), measured=True)
    assert not packed.fits(replace(PLAIN, split="0.5"), 2)  # four bottoms take all of it
    assert packed.fits(replace(PLAIN, split="0.5"), 3)
    assert not packed.fits(replace(PLAIN, scope="per-layer"), 3)
    assert {e.setting.split for e in compare_settings(packed, 2)} == {OFF, "0.75"}


@needs_option("miss_precision")
def test_low_precision_is_among_them_where_it_is_allowed():
    recorded = with_weights()
    model = replace(MODEL, low=0.25)
    routing = recorded_workload(recorded, model, "it")
    lower = Estimator(model, COSTS, routing, measured=True, precision="int4", low_below=0.6)
    estimated = [e for e in compare_settings(lower, 24) if e.setting.miss_precision == "int4"]
    assert len(estimated) == 2
    assert all("--miss-precision int4 --low-below 0.6" in e.setting.flags() for e in estimated)
    still = next(e for e in estimated if e.setting.prefetch == OFF)
    exact = lower.of(replace(still.setting, miss_precision=OFF, low_below=None), 24)
    assert still.tpot < exact.tpot
    assert all(point.setting.miss_precision == OFF for point in planner.memory_curve(
        lower, still.setting, MODEL.memory(24)))  # fmt: skip
    with pytest.raises(UsageError, match="the trace has no gate weights"):
        Estimator(model, COSTS, workload(), precision="int4")


GPU_COSTS = replace(COSTS, links=(Link(1e8), *COSTS.links))


def test_split_experts_are_estimated_with_a_host_tier():
    """Read from disk they are slower than from host memory, which needs a slot a layer here."""
    model, halves = replace(MODEL, segments=True), replace(PLAIN, split="0.5")
    none, some, full = (
        Estimator(model, GPU_COSTS, workload(), measured=True, host=n) for n in (0, 8, 64)
    )
    assert full.of(halves, 24).tpot < some.of(halves, 24).tpot < none.of(halves, 24).tpot
    uneven = replace(PLAIN, scope="per-layer", split="0.5,1,1,1")
    few = Estimator(model, GPU_COSTS, workload(), measured=True, host=3)
    assert some.fits(uneven, 24)
    assert not few.fits(uneven, 24)
    assert few.fits(halves, 24)


@needs_option("miss_precision")
def test_copies_take_a_part_of_host_memory():
    model = replace(MODEL, low=0.25)
    routing = recorded_workload(with_weights(), model, "it")
    lower = Estimator(
        model, GPU_COSTS, routing, measured=True, precision="int4", low_below=0.6, host=10
    )
    setting = replace(PLAIN, miss_precision="int4", low_below=0.6)
    assert (lower._host_slots(PLAIN), lower._host_slots(setting)) == (10, 8)
    without = Estimator(model, GPU_COSTS, routing, measured=True, precision="int4", low_below=0.6)
    assert lower.of(setting, 24).tpot < without.of(setting, 24).tpot
    with pytest.raises(UsageError, match="works without host memory only"):
        Estimator(replace(model, nested=True), GPU_COSTS, routing, precision="int4", host=10)


def with_weights() -> Trace:
    """The recording, with gate weights."""
    recorded = trace()
    rng = np.random.default_rng(0)
    return replace(recorded, weights=rng.random(recorded.experts.shape).astype(np.float16))


@needs_option("co_compute")
def test_computing_on_the_host_is_among_them_where_it_was_asked_for():
    """An expert comes in 4 ms from host memory too, and the host computes it in 2."""
    costs = replace(COSTS, links=(Link(1e12), *COSTS.links), host=Work.constant(2e-3))
    without_host, both = (
        Estimator(MODEL, costs, workload(), measured=True, host=64, co_compute=both)
        for both in (False, True)
    )
    shared = [e for e in compare_settings(both, 24) if e.setting.co_compute != OFF]
    assert PLAIN.policy in {e.setting.policy for e in shared}
    assert all("--co-compute auto" in e.setting.flags() for e in shared)
    moved = without_host.of(PLAIN, 24)
    assert both.of(replace(PLAIN, co_compute=AUTO), 24).tpot < 0.9 * moved.tpot
    assert {e.setting.co_compute for e in compare_settings(without_host, 24)} == {OFF}
    assert moved.tpot < Estimator(MODEL, costs, workload(), measured=True).of(PLAIN, 24).tpot


def fake(setting: Setting, gaps: np.ndarray) -> Estimate:
    tpot = float(gaps.mean())
    return Estimate(setting, 8, 0, tpot, tpot, tpot, None, 0.5, 1.0, 0.5, gaps)


def test_another_than_the_default_only_where_that_is_sure():
    gaps = np.random.default_rng(0).random(64) + 1.0
    usual, faster = fake(DEFAULT, gaps), fake(PLAIN, 0.9 * gaps)
    little = fake(PLAIN, 0.99 * gaps)
    lucky = fake(PLAIN, np.random.default_rng(1).permutation(gaps) * 0.96)
    assert surely_faster(faster, usual)
    assert not surely_faster(little, usual)  # sure, and not worth it
    assert not surely_faster(lucky, usual)  # worth it, and not sure
    assert choose_setting(estimator(), (faster, usual)) == (faster, True)
    assert choose_setting(estimator(), (little, usual)) == (usual, False)
    guessed = Estimator(MODEL, COSTS, synthetic_workload(MODEL))
    assert choose_setting(guessed, (faster, usual)) == (
        usual,
        False,
    )  # synthetic


def test_the_curve_falls_and_ends_with_everything_in_memory():
    points = example_plan().curve
    assert [p.memory for p in points] == sorted(p.memory for p in points)
    assert all(b.tpot < a.tpot * 1.02 for a, b in pairwise(points))
    assert points[-1].capacity == MODEL.experts
    assert MODEL.memory(24) in [p.memory for p in points]
    assert default_curve(estimator(), 1)[0].capacity == MODEL.least_slots


def test_the_least_memory_for_a_target():
    best, all_resident = example_plan().best, estimator().of(PLAIN, MODEL.experts)
    middle = (best.tpot + all_resident.tpot) / 2
    estimated = reach_target(estimator(), best, MODEL.memory(MODEL.experts), middle)
    assert estimated.blocked is None
    assert estimated.least is not None
    assert estimated.least.tpot <= middle
    fewer = estimator().of(best.setting, estimated.least.capacity - 2)
    assert fewer.tpot > middle * 0.97  # no size far below it would do
    assert "needs at least" in target_message(estimated)


def test_targets_out_of_reach():
    within = reach_target(
        estimator(), example_plan().best, MODEL.memory(24), 0.9 * example_plan().best.tpot
    )
    assert within.blocked is not None
    assert "reading experts is too slow" in within.blocked
    assert within.nearest.memory == MODEL.memory(24)
    never = reach_target(estimator(), example_plan().best, MODEL.memory(24), 1e-6)
    assert never.least is None
    assert "the processor is too slow" in target_message(never)
    assert never.nearest.memory == MODEL.memory(MODEL.experts)
    with pytest.raises(UsageError, match="must be more than 0"):
        plan(estimator(), MODEL.memory(24), 0.0)
    with pytest.raises(BudgetError, match="; give --memory"):
        plan(estimator(), MIB)


def test_the_page_is_complete_in_itself():
    html = plan_page("small", [("model", "<one>")], example_plan(), "greenroom plan small")
    assert "&lt;one&gt;" in html
    assert example_plan().best.setting.flags() in html
    assert html.count("<svg") == 1
    assert "http" not in html.replace("http://www.w3.org", "")
    assert example_plan().target is not None
    assert "TPOT of 100 ms" in html


def test_what_was_simulated_is_not_simulated_again(monkeypatch: pytest.MonkeyPatch):
    mine = Estimator(MODEL, COSTS, workload(), measured=True)
    first = mine.of(PLAIN, 24)
    monkeypatch.setattr(estimate, "time_trace", None)
    assert mine.of(PLAIN, 24) is first


def test_margins_are_sane():
    assert 0 < planner.MARGIN < BAND <= 0.25 < UNMEASURED
