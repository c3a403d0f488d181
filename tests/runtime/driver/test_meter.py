from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from greenroom.core.counts import Counts
from greenroom.runtime.driver.meter import CAUSES, LinkMeter, Meter, subtract_counts


def test_a_link_is_busy_while_any_lane_is():
    """Two lanes: 1 to 4 s and 2 to 6 s, then one of them 10 to 11 s."""
    link = LinkMeter()
    link.chunk_started(1.0)
    link.chunk_started(2.0)
    link.chunk_ended(4.0, 100)
    assert (link.busy_s, link.moving, link.nbytes) == (0.0, 1, 100)
    assert link.busy_until(4.5) == 3.5
    link.chunk_ended(6.0, 0)  # failed: no bytes, but the link was busy
    assert link.busy_s == link.busy_until(9.0) == 5.0
    link.chunk_started(10.0)
    link.chunk_ended(11.0, 50)
    assert (link.busy_s, link.moving, link.nbytes) == (6.0, 0, 150)


def test_bytes_read_are_those_of_the_first_link_and_stalls_add_up():
    meter = Meter.for_lanes((2, 1))
    meter.links[0].nbytes, meter.links[1].nbytes = 7, 5
    meter.stalls["miss"], meter.stalls["late"] = 1.5, 0.25
    assert len(meter.links) == 2
    assert meter.bytes_read == 7
    assert meter.stall_s == 1.75
    assert set(meter.stalls) == set(CAUSES)


def test_a_copy_does_not_change_with_the_original():
    meter = Meter.for_lanes((1, 1))
    before = meter.copy()
    meter.links[1].chunk_started(1.0)
    meter.links[1].chunk_ended(3.0, 9)
    meter.stalls["prefill"] += 2.0
    meter.passes += 1
    assert before == Meter.for_lanes((1, 1))
    spent = subtract_counts(meter, before)
    assert (spent.links[1].nbytes, spent.links[1].busy_s, spent.passes) == (9, 2.0, 1)
    assert spent.stalls == {"miss": 0.0, "late": 0.0, "prefill": 2.0}


def test_the_difference_of_counts_is_of_every_count():
    after = Counts(*range(12, 24))
    before = Counts(*range(12))
    assert subtract_counts(after, before) == Counts(*[12] * 12)
    assert subtract_counts(after, replace(after)) == Counts()


def test_lists_of_different_lengths_have_no_difference():
    @dataclass
    class Of:
        numbers: list[int] = field(default_factory=list)

    assert subtract_counts(Of([3, 4]), Of([1, 1])) == Of([2, 3])
    with pytest.raises(ValueError, match="shorter"):
        subtract_counts(Of([3, 4]), Of([1]))
