"""Times by hand, in seconds."""

from __future__ import annotations

import pytest

from greenroom.core.prefetch.pace import Average, Pace


def test_an_average_starts_with_the_first_value_and_keeps_nine_tenths():
    average = Average()
    assert average.value is None
    average.add(4.0)
    assert average.value == 4.0
    average.add(14.0)
    assert average.value == pytest.approx(5.0)


def test_idle_time_is_unknown_before_two_layers():
    pace = Pace()
    pace.routed(1.0, False, same_pass=False)
    assert pace.idle[False].value is None


def test_the_time_of_demands_is_not_idle():
    """A layer takes 10 s, in 3 of which demands are waited for: 7 are left."""
    pace = Pace()
    pace.routed(0.0, False, same_pass=False)
    pace.link(2.0, moving=1, demanding=True, landed=False)
    pace.link(5.0, moving=1, demanding=False, landed=True)  # a prefetch from here on
    pace.routed(10.0, False, same_pass=True)
    assert pace.idle[False].value == pytest.approx(7.0)


def test_a_demand_across_a_routing_is_divided_between_two_layers():
    pace = Pace()
    pace.routed(0.0, False, same_pass=False)
    pace.link(6.0, moving=1, demanding=True, landed=False)
    pace.routed(10.0, False, same_pass=True)  # 6 of 10 are idle
    pace.link(12.0, moving=0, demanding=False, landed=True)
    pace.routed(20.0, False, same_pass=True)  # 8 of 10
    assert pace.idle[False].value == pytest.approx(0.9 * 6 + 0.1 * 8)


def test_prompts_and_tokens_have_separate_averages():
    pace = Pace()
    for now, prefill in ((0.0, True), (8.0, True), (10.0, False)):
        pace.routed(now, prefill, same_pass=True)
    assert pace.idle[True].value == 8.0
    assert pace.idle[False].value == 2.0


def test_the_time_between_passes_or_after_a_pause_is_not_counted():
    pace = Pace()
    pace.routed(0.0, False, same_pass=False)
    pace.paused()
    pace.routed(100.0, False, same_pass=True)
    pace.routed(900.0, False, same_pass=False)
    assert pace.idle[False].value is None
    pace.routed(901.0, False, same_pass=True)
    assert pace.idle[False].value == 1.0


def test_chunks_are_timed_from_one_arrival_to_the_next_while_the_link_is_busy():
    """Two lanes: arrivals at 3, 4 and 5 s; idle until 20 s; then one that takes 2 s."""
    pace = Pace()
    pace.link(0.0, moving=2, demanding=False, landed=False)
    pace.link(3.0, moving=2, demanding=False, landed=True)
    assert pace.chunk.value == 3.0
    pace.link(4.0, moving=1, demanding=False, landed=True)
    assert pace.chunk.value == pytest.approx(2.8)
    pace.link(5.0, moving=0, demanding=False, landed=True)
    assert pace.chunk.value == pytest.approx(2.62)
    pace.link(20.0, moving=1, demanding=False, landed=False)
    pace.link(22.0, moving=0, demanding=False, landed=True)
    assert pace.chunk.value == pytest.approx(0.9 * 2.62 + 0.2)


def test_a_clock_that_stands_still_changes_no_average():
    pace = Pace()
    for _ in range(3):
        pace.routed(0.0, False, same_pass=True)
        pace.link(0.0, moving=1, demanding=True, landed=True)
    assert pace.idle[False].value is None
    assert pace.chunk.value is None
