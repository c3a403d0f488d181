"""Predictors in a simulation: what is learned before it, and a sliding window by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from greenroom.core.build import build_scheduler
from greenroom.core.config.scheduler import SchedulerConfig
from greenroom.core.cost import Costs, Link, Work
from greenroom.core.pieces import Pieces
from greenroom.policies import policy
from greenroom.sim.clock import Clock
from greenroom.sim.event_driven import EventOptions, passes, simulate_events
from greenroom.sim.foresight import foresight_of
from greenroom.sim.study import Cell, Study
from greenroom.sim.timed import learned_by_policy
from greenroom.trace import Prediction, stream
from tests.sim import small

COSTS = Costs((Link(3000.0, 0.01),), Work.constant(0.1), Work.constant(0.5))
# Two kinds of requests, whose tokens take the same path each time.
PATHS = np.array([[[0], [3], [5]], [[1], [4], [2]]], np.uint8)


def requests_of(kinds: list[int]):
    """Return a trace with four tokens for each request, by kind."""
    experts = [PATHS[kind].tolist() for kind in kinds for _ in range(4)]
    return small.of(experts, [[1] * 4] * len(kinds), most=8)


EARLIER, LATER = requests_of([0, 1, 0, 1]), requests_of([1, 0])


def run(name: str, prefetch: str, trace=LATER, **options):
    return simulate_events(
        trace, stream(trace, "runtime"), 8, policy(name), COSTS, 1000, prefetch,
        EventOptions(**options),
    )  # fmt: skip


def test_a_predictor_knows_earlier_requests_and_the_cache_is_empty():
    """The first request's first token: nothing is known of it without the earlier trace."""
    one = LATER.head(1)
    cold, warm = (run("lru", "eamc:1", one, history=history) for history in (None, EARLIER))
    assert (cold.accuracy, warm.accuracy) == (0.0, 1.0)
    assert warm.counts.requests == cold.counts.requests == 3
    assert warm.times.misses == 3 - warm.counts.useful  # all had to come from the store


@pytest.mark.parametrize("prefetch", ["off", "oracle", "noisy-oracle:1,accuracy=0.5"])
def test_what_learns_nothing_is_as_without_history(prefetch):
    cold, warm = (run("lru", prefetch, history=history) for history in (None, EARLIER))
    assert cold.as_json() == warm.as_json()


def test_a_policy_s_weights_are_those_after_the_earlier_trace():
    trace = small.trace([[1] * 60] * 3, layers=3, experts=8, top_k=2, seed=5)
    pieces = Pieces.unsplit(trace.offsets.tolist(), [1000] * 3, [1] * 24)
    requests = stream(trace, "runtime")
    learned = learned_by_policy(requests, pieces, 8, policy("next-use"), "shared", 0)
    again = learned_by_policy(requests, pieces, 8, policy("next-use"), "shared", 0)
    assert learned.keys() == again.keys()
    assert all((learned[name] == again[name]).all() for name in learned)
    assert learned_by_policy(requests, pieces, 8, policy("lru"), "shared", 0) == {}
    start = learned_by_policy(
        stream(trace.head(1), "runtime"), pieces, 8, policy("next-use"), "shared", 0
    )
    assert any((learned[name] != start[name]).any() for name in learned)
    misses = [
        run("next-use", "off", trace, history=history, reset=reset).times.misses
        for history in (None, trace)
        for reset in (False, True)
    ]
    assert misses[2] < misses[0]  # of the same trace again
    assert misses[3] < misses[1]  # each request starts with what was learned before


def test_a_study_with_a_history_simulates_events():
    study = Study.of(LATER, "runtime", costs=COSTS, expert_bytes=1000)
    cold, warm = (each.run(Cell("lru", 8)) for each in
                  (study, dataclasses.replace(study, history=EARLIER)))  # fmt: skip
    assert "wasted" not in cold
    assert warm["wasted"] == 0
    assert (cold["misses"], cold["tpot_mean_s"]) == (
        warm["misses"], pytest.approx(warm["tpot_mean_s"]),
    )  # fmt: skip


def test_promoe_s_sliding_window_by_hand():
    """ProMoE, 4.3 and footnote 1, with k = 2 and predictions that are right.

    Six layers of four experts, top-1. Layers 1 and 2 are predicted at layer 0, and each later one
    two layers before; layer 0 never. A layer takes 2 s and its expert 0.25 s, a transfer 1 s: only
    the two misses of layer 0 are waited for.
    """
    chosen = [[[0], [1], [2], [3], [0], [1]], [[3], [2], [1], [0], [3], [2]]]
    trace = small.of(chosen, [[1, 1]])
    trace = dataclasses.replace(trace, predictions={"learned": Prediction(trace.experts, 2)})
    pieces = Pieces.unsplit(trace.offsets.tolist(), [1000] * 6)
    scheduler = build_scheduler(
        pieces, 20, policy("lru"), SchedulerConfig(prefetch_rule="top-k"), top_k=1, ahead=4
    )
    costs = Costs((Link(1000.0, lanes=1),), Work.constant(0.25), Work.constant(2.0))
    clock = Clock(scheduler, costs, foresight_of(trace, "learned"))
    for at, steps in passes(trace, stream(trace, "runtime")):
        clock.begin(at)
        for step in steps:
            clock.run(step)
    assert clock.fetched == [0, 5, 10, 15, 16, 21, 3, 6, 9, 12, 19, 22]
    assert (clock.now, clock.stall) == (12 * 2.25 + 2, 2.0)
    counts = scheduler.counts
    assert (counts.prefetches, counts.useful, counts.misses) == (10, 10, 2)
    predicted = scheduler.view.accuracy.by_distance()
    assert [(row["layer"], row["distance"]) for row in predicted] == [
        (1, 1), (2, 2), (3, 2), (4, 2), (5, 2)
    ]  # fmt: skip
    assert {row["goodpred"] for row in predicted} == {1.0}
