"""What is learned before a simulation: weights of a policy, the collection of a predictor."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from greenroom.core.cost import Costs, Link, Work
from greenroom.core.pieces import Pieces
from greenroom.policies import policy
from greenroom.sim.event_driven import EventOptions, simulate_events
from greenroom.sim.study import Cell, Study
from greenroom.sim.timed import learned_by_policy
from greenroom.trace import stream
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
