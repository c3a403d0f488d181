from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from greenroom.core.cost import FREE, Costs, Link, Work
from greenroom.core.pieces import Pieces
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.policies import policy
from greenroom.sim.clock import Clock, TraceStep
from tests.sim.small import simulate


def steps(*experts: list[int]) -> list[TraceStep]:
    return [TraceStep(i, 0, np.array(e, np.int64)) for i, e in enumerate(experts)]


def costs_of(*links: Link, expert: float = 0.0, dense: float = 0.0) -> Costs:
    """An expert takes `expert` a token."""
    return Costs(links, Work(((1, expert),)), Work.constant(dense))


PIECES = Pieces.unsplit([0, 4], [1000])


def test_counts_of_a_hand_worked_trace():
    result = simulate(steps([0, 1], [0, 2], [1, 2]), PIECES, 2, policy("lru"))
    assert (result.requests, result.misses, result.miss_ratio) == (6, 4, 4 / 6)
    assert result.miss_ids == [0, 1, 2, 1]
    assert result.bytes_moved == 4000


def test_time_of_a_hand_worked_step():
    """Two misses of one second each on a link, half a second of latency, 0.25 s to compute one."""
    costs = costs_of(Link(bandwidth=1000, latency=0.5), expert=0.25, dense=2.0)
    result = simulate(steps([0, 1], [0]), PIECES, 4, policy("lru"), costs=costs)
    # 2.0 dense; first lands at 3.5, computed by 3.75; second lands at 4.5, computed by 4.75;
    # then 2.0 dense and 0.25 for a hit.
    assert result.seconds == pytest.approx(7.0)
    assert result.stall == pytest.approx(1.5 + 0.75)


def test_a_hit_hides_a_transfer():
    costs = costs_of(Link(bandwidth=1000), expert=5.0)
    result = simulate(steps([0], [0, 1]), PIECES, 4, policy("lru"), costs=costs)
    assert result.stall == pytest.approx(1.0)  # only the first, cold one
    assert result.seconds == pytest.approx(1 + 5 + 5 + 5)


def test_chunks_of_a_piece_add_up():
    pieces = Pieces.unsplit([0, 4], [1001], [3, 3, 3, 3])
    costs = costs_of(Link(bandwidth=1001, lanes=1))
    result = simulate(steps([0]), pieces, 4, policy("lru"), costs=costs)
    assert result.bytes_moved == 1001
    assert result.seconds == pytest.approx(1.0)


# ---- several devices: experts 0 and 2 of layer 0 are at home on the first, 1 and 3 on the second

TWO = Pieces.unsplit([0, 4], [1000], devices=2)


def test_two_links_halve_the_transfers_of_an_even_load():
    costs = costs_of(Link(bandwidth=1000, latency=0.25, lanes=1))
    requests = steps([0, 1, 2, 3])
    one = simulate(requests, PIECES, 4, policy("lru"), costs=costs)
    two = simulate(requests, TWO, 4, policy("lru"), costs=costs)
    assert (one.misses, one.bytes_moved) == (two.misses, two.bytes_moved) == (4, 4000)
    assert one.seconds == pytest.approx(4 * 1.25)
    assert two.seconds == pytest.approx(2 * 1.25)


def test_an_uneven_load_is_as_slow_as_its_slowest_link():
    costs = costs_of(Link(bandwidth=1000, lanes=1), expert=0.5)
    uneven = simulate(steps([0, 1, 2]), TWO, 4, policy("lru"), costs=costs)
    # 0 and 1 land at 1 and are computed side by side until 1.5; 2 lands at 2.
    assert uneven.seconds == pytest.approx(2.5)
    assert uneven.stall == pytest.approx(1.5)


def test_devices_share_the_way_to_host_memory():
    costs = costs_of(Link(bandwidth=1000, lanes=1), Link(bandwidth=500, lanes=1))
    one = simulate(steps([0, 1, 2, 3]), PIECES, 4, policy("lru"), costs=costs)
    two = simulate(steps([0, 1, 2, 3]), TWO, 4, policy("lru"), costs=costs)
    assert one.seconds == pytest.approx(1 + 4 * 2)
    assert two.seconds == pytest.approx(4 + 2)  # the disk carries one after another
    assert two.bytes_moved == 4000


def test_devices_compute_resident_experts_at_the_same_time():
    costs = costs_of(Link(bandwidth=float("inf")), expert=1.0)
    twice = steps([0, 1, 2, 3], [0, 1, 2, 3])
    one = simulate(twice, PIECES, 4, policy("lru"), costs=costs)
    two = simulate(twice, TWO, 4, policy("lru"), costs=costs)
    assert one.misses == two.misses == 4
    assert (one.seconds, two.seconds) == (pytest.approx(8), pytest.approx(4))
    assert one.compute == two.compute == pytest.approx(8)


def test_other_devices_get_the_inputs_one_after_another():
    """Four experts on four devices: the second waits 1 s for its inputs, the fourth 3 s."""
    four = Pieces.unsplit([0, 4], [1000], devices=4)
    costs = replace(costs_of(Link(bandwidth=float("inf")), expert=0.5), hop=1.0)
    result = simulate(steps([0, 1, 2, 3]), four, 4, policy("lru"), costs=costs)
    assert result.seconds == pytest.approx(3.5)
    assert simulate(steps([0]), four, 4, policy("lru"), costs=costs).seconds == 0.5
    assert simulate(steps([3]), four, 4, policy("lru"), costs=costs).seconds == 1.5


def test_whole_layers_wait_for_one_link():
    """Layer 1 is on the second device; each expert takes 1 s on its link, and inputs 0.25 s."""
    layers = Pieces.unsplit([0, 4, 8], [1000] * 2, devices=2, placement="layers")
    costs = replace(costs_of(Link(bandwidth=1000, lanes=1), expert=0.5), hop=0.25)
    both = [TraceStep(0, n, np.array([4 * n, 4 * n + 1], np.int64)) for n in range(2)]
    result = simulate(both, layers, 8, policy("lru"), costs=costs)
    # The first expert is computed while the second one comes.
    assert result.seconds == pytest.approx((2 + 0.5) + (2 + 0.5))
    again = [TraceStep(1, n, step.experts) for n, step in enumerate(both)]
    hits = simulate(both + again, layers, 8, policy("lru"), costs=costs)
    assert hits.seconds == pytest.approx(result.seconds + 2 * 0.5 + 2 * 0.5 + 0.25)


def test_new_costs_apply_from_the_time_of_the_change():
    """Filling a cache is free, then a transfer takes what its link takes."""
    slow = costs_of(Link(bandwidth=1000))
    clock = Clock(Scheduler(PIECES, 1, policy("lru"), lanes=slow.lanes), FREE)
    first, second = steps([0], [1])
    clock.run(first)
    assert clock.now == 0
    clock.set_costs(slow)
    clock.run(second)
    assert clock.now == 1
