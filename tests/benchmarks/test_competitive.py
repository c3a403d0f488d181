"""Exact competitive ratios: known ones, and the worst traces replayed with real policies."""

from __future__ import annotations

import pytest

from benchmarks.papers import competitive
from benchmarks.papers.competitive import Shape
from greenroom.policies import policy
from greenroom.sim.curves import opt_curve
from greenroom.sim.replay import replay
from greenroom.trace import stream

SHAPES = [Shape(1, 3, 2), Shape(1, 4, 3), Shape(2, 2, 2), Shape(2, 2, 3), Shape(3, 2, 4)]


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("serve", [competitive.lru, competitive.llru])
def test_with_one_layer_and_a_page_more_than_slots_the_ratio_is_k(serve, slots):
    """Sleator and Tarjan, 1985; with one layer LLRU is LRU."""
    graph = competitive.search(Shape(1, slots + 1, slots), serve)
    assert competitive.worst_cycle(graph)[0] == pytest.approx(slots)


def test_two_layers_of_two_and_two_slots_worked_out_by_hand():
    """The cycle a, c, b, d: LRU misses every request.

    OPT with k slots misses (N - k) / (N - 1) = 2 of 3 requests of a cycle of N = 4 pages."""
    graph = competitive.search(Shape(2, 2, 2), competitive.lru)
    assert competitive.worst_cycle(graph)[0] == pytest.approx(1.5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["lru", "llru"])
def test_the_worst_trace_has_the_ratio_in_a_replay(name, shape):
    graph = competitive.search(shape, getattr(competitive, name))
    ratio, cycle = competitive.worst_cycle(graph)
    counts = []
    for times in (20, 60):
        trace = competitive.worst_trace(shape, graph, cycle, times)
        requests = stream(trace, "natural")
        done = replay(requests, trace.offsets, shape.slots, policy(name), pin="none")
        opt = opt_curve(requests, trace.offsets).misses[shape.slots - 1]
        counts.append((done.misses, int(opt)))
    (misses, floor), (more, more_floor) = counts
    assert (more - misses) / (more_floor - floor) == pytest.approx(ratio, rel=0.02)


def test_with_one_slot_every_policy_misses_what_opt_misses():
    graph = competitive.search(Shape(2, 2, 1), competitive.llru)
    assert competitive.worst_cycle(graph)[0] == 1
