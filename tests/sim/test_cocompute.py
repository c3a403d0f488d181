"""Simulated time where the host's processor computes too: hand-worked, and never for nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from greenroom.core.config.scheduler import SchedulerConfig
from greenroom.core.cost import Costs, Link, Work
from greenroom.core.options.rules.rates import Rates
from greenroom.core.pieces import Pieces
from greenroom.core.transfers.tiers import HostTier
from greenroom.policies import policy
from greenroom.sim.clock import TraceStep
from greenroom.sim.event_driven import EventOptions, simulate_events
from greenroom.trace import stream
from tests.sim import small
from tests.sim.small import simulate

CoCompute = pytest.importorskip("greenroom.core.options.rules.cocompute").CoCompute

PIECES = Pieces.unsplit([0, 8], [1000])


def costs(bus: float, host: float, device: float = 0.0, dense: float = 0.0) -> Costs:
    """Seconds of an expert on each; the disk takes none."""
    return Costs(
        (Link(float("inf"), lanes=1), Link(1000 / bus, lanes=1)), Work.constant(device),
        Work.constant(dense), host=Work.constant(host),
    )  # fmt: skip


def run(run_costs: Costs, *requests: list[int], capacity: int = 2, both: bool = True):
    steps = [TraceStep(i, 0, np.array(e, np.int64)) for i, e in enumerate(requests)]
    tier = HostTier(PIECES, 8, policy("lru"))
    options = [CoCompute(Rates(run_costs, 1000))] if both else []
    return simulate(
        steps, PIECES, capacity, policy("lru"), costs=run_costs, host=tier, options=options
    )


def test_three_misses_end_when_two_are_moved_and_one_is_computed():
    run_costs = costs(bus=1.0, host=2.0)
    moved = run(run_costs, [0, 1, 2], [3, 4, 5], both=False, capacity=3)
    shared = run(run_costs, [0, 1, 2], [3, 4, 5], capacity=3)
    assert moved.seconds == pytest.approx(6.0)
    assert shared.seconds == pytest.approx(4.0)
    assert (shared.misses, shared.on_host) == (6, 2)
    assert shared.stall == pytest.approx(0.0)  # the host computes all the time
    assert moved.stall == pytest.approx(6.0)


def test_a_slow_host_computes_nothing_and_a_fast_one_everything():
    slow = run(costs(bus=1.0, host=9.0), [0, 1], [2, 3])
    assert (slow.on_host, slow.seconds) == (0, pytest.approx(4.0))
    quick = run(costs(bus=9.0, host=1.0), [0, 1], [2, 3])
    assert (quick.on_host, quick.seconds) == (4, pytest.approx(4.0))
    assert quick.bytes_moved == 4000  # from the disk, to host memory


@pytest.mark.parametrize(("bus", "host"), [(1.0, 9.0), (9.0, 1.0)])
def test_a_layer_that_misses_takes_the_same_once_wherever_experts_are_computed(bus, host):
    """An expert of 1 s in each of the steps; the last one is in host memory by then."""
    run_costs = replace(costs(bus, host), miss=0.5)
    shared = run(run_costs, [0], [1], [0], capacity=1)
    assert shared.seconds == pytest.approx(3 * (1.0 + 0.5))
    assert shared.on_host == 3 * (host < bus)
    moved = run(run_costs, [0], [1], [1], capacity=1, both=False)
    assert moved.seconds == pytest.approx(2 * (bus + 0.5))


@pytest.mark.parametrize("host_ms", [0.3, 1.0, 3.0, 10.0])
def test_co_computing_makes_no_token_slower(host_ms):
    """With what follows to the device, and an expert that takes 1 ms to be moved."""
    trace = small.trace([[-4, *[1] * 60]], layers=4, experts=16, top_k=4)
    requests = stream(trace, "runtime")
    run_costs = replace(
        costs(bus=1e-3, host=host_ms * 1e-3, device=2e-5, dense=2e-4),
        host=Work(((1, host_ms * 1e-3),)),
    )
    options = {"host": 64, "chunk_bytes": 250}
    moved_only = simulate_events(
        trace, requests, 16, policy("lru"), run_costs, 1000, "off", EventOptions(**options)
    )
    both = simulate_events(
        trace,
        requests,
        16,
        policy("lru"),
        run_costs,
        1000,
        "off",
        EventOptions(config=SchedulerConfig(co_compute="auto"), **options),
    )
    assert both.times.gaps.mean() <= 1.02 * moved_only.times.gaps.mean()
    if host_ms <= 1.0:
        assert both.counts.on_host > 0
        assert both.counts.promoted > 0
        assert both.times.gaps.mean() < 0.9 * moved_only.times.gaps.mean()


def test_a_pinned_expert_stays_from_its_first_use():
    trace = small.trace([[*[1] * 40]], layers=1, experts=8, top_k=2)
    requests, run_costs = stream(trace, "runtime"), costs(bus=1e-3, host=1e-3)
    with_tier = simulate_events(
        trace,
        requests,
        6,
        policy("fifo"),
        run_costs,
        1000,
        "off",
        EventOptions(host=8, stay=(0, 1, 2, 3)),
    )
    asked_for = [int((trace.experts == e).sum()) for e in range(8)]
    first = sum(n > 0 for n in asked_for[:4])
    assert first < sum(asked_for[:4])
    assert first <= with_tier.times.misses <= first + sum(asked_for[4:])
