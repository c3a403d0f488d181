"""Times of a trace: by hand, against the event machine run over everything, and laws."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from greenroom.core.cost import COOLED, Costs, Link, Work
from greenroom.core.pieces import Pieces
from greenroom.policies import policy
from greenroom.sim.timed import SimulatedTimes, time_trace, times_by_request
from greenroom.trace import stream
from tests.sim import small
from tests.sim.small import simulate

NBYTES = 1000
MIXED = [[-5, 1, 1, 1], [-1, 1], [-3, -9, 1, 1], [1, 1], [-20, 1, 1, 1, 1]]
COSTS = Costs(
    (Link(3000.0, 0.07),),
    Work(((1, 0.1), (4, 0.15), (16, 0.9))),
    Work(((1, 0.2), (9, 0.5))),
    handling=0.03,
    miss=0.07,
    wake=0.2,
)


def run(trace, capacity: int = 8, costs: Costs = COSTS, name: str = "lru", **how) -> SimulatedTimes:
    how = {"chunk_bytes": 300, **how}
    return time_trace(trace, stream(trace, "runtime"), capacity, policy(name), costs, NBYTES, **how)


def test_a_request_by_hand():
    """A prompt of two tokens, then two tokens; one layer, an expert takes 1 s to come.

    Costs: 0.25 s an expert and token, 2 s dense, one lane. The prompt asks for 0, 1 and 2 (2 by
    both tokens): dense until 2; 0 is there at 3, computed at 3.25; 1 at 4, 4.25; 2 at 5, 5.5.
    The first token asks for 0 and 1: hits, 2.5 s. The second for 1 and 3: 3 evicts 2; dense 2 s, 1
    is computed while 3 comes, which is there after 3 s and computed after 3.25.
    """
    trace = small.of([[[0, 2]], [[1, 2]], [[0, 1]], [[3, 1]]], [[-2, 1, 1]])
    costs = Costs((Link(NBYTES, lanes=1),), Work(((1, 0.25),)), Work.constant(2.0))
    result = run(trace, 3, costs, chunk_bytes=NBYTES)
    assert result.ttft.tolist() == pytest.approx([5.5])
    assert result.gaps.tolist() == pytest.approx([2.5, 3.25])
    assert (result.requests, result.misses, result.bytes_moved) == (7, 4, 4 * NBYTES)
    assert result.seconds == pytest.approx(11.25)
    assert result.compute == pytest.approx(6.0 + 4 * 0.25 + 4 * 0.25)
    assert result.stall == pytest.approx(result.seconds - result.compute)
    row = result.as_json()
    assert row["ttft_s"] == pytest.approx(5.5)
    assert row["tpot_mean_s"] == pytest.approx(2.875)
    assert row["tokens_per_s"] == pytest.approx(2 / 5.75)


def test_what_is_fetched_is_handled_by_the_processor():
    """As above, and 0.125 s more for each expert that comes: the first two of the prompt are
    handled while the link goes on, and in the second token the miss is the last to be computed."""
    trace = small.of([[[0, 2]], [[1, 2]], [[0, 1]], [[3, 1]]], [[-2, 1, 1]])
    costs = Costs((Link(NBYTES, lanes=1),), Work(((1, 0.25),)), Work.constant(2.0), 0.125)
    result = run(trace, 3, costs, chunk_bytes=NBYTES)
    assert result.ttft.tolist() == pytest.approx([5.5 + 0.125])
    assert result.gaps.tolist() == pytest.approx([2.5, 3.25 + 0.125])
    assert result.compute == pytest.approx(6.0 + 4 * 0.25 + 4 * 0.25 + 4 * 0.125)


def test_a_layer_that_waits_takes_longer_once() -> None:
    """As above, and 0.125 s for each layer with misses: the prompt and the second token."""
    trace = small.of([[[0, 2]], [[1, 2]], [[0, 1]], [[3, 1]]], [[-2, 1, 1]])
    costs = Costs((Link(NBYTES, lanes=1),), Work(((1, 0.25),)), Work.constant(2.0), miss=0.125)
    result = run(trace, 3, costs, chunk_bytes=NBYTES)
    assert result.ttft.tolist() == pytest.approx([5.5])  # while the link goes on
    assert result.gaps.tolist() == pytest.approx([2.5, 3.25 + 0.125])
    assert result.compute == pytest.approx(6.0 + 4 * 0.25 + 4 * 0.25 + 2 * 0.125)


def test_what_follows_a_wait_takes_longer():
    """The first request's first token again: an eighth of its only wait, which is capped, more. The
    waits of the prompt are 1 s for 0, then 0.75 s each."""
    trace = small.of([[[0, 2]], [[1, 2]], [[0, 1]], [[3, 1]]], [[-2, 1, 1]])
    costs = Costs(
        (Link(NBYTES, lanes=1),), Work(((1, 0.25),)), Work.constant(2.0), wake=0.125 / COOLED
    )
    result = run(trace, 3, costs, chunk_bytes=NBYTES)
    assert result.ttft.tolist() == pytest.approx([5.5 + 3 * 0.125])
    assert result.gaps.tolist() == pytest.approx([2.5, 3.25 + 0.125])
    assert result.seconds == pytest.approx(11.25 + 4 * 0.125)
    assert result.stall == pytest.approx(result.seconds - result.compute)
    assert costs.seconds_after_wait(COOLED / 2) == pytest.approx(0.0625)


def test_passes_of_requests():
    """TTFT: the passes of the prompt, or the first pass where there is none."""
    trace = small.trace([[-2, 1, 1], [1, 1], [-3, -1, 1], [-4]])
    ttft, gaps = times_by_request(trace, np.array([1.0, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert ttft.tolist() == [1, 4, 6 + 7, 9]
    assert gaps.tolist() == [2, 3, 5, 8]


def test_no_decode_has_no_tpot():
    row = run(small.trace([[-4], [-2]])).as_json()
    assert row["tpot_s"] is None
    assert row["tokens_per_s"] is None
    assert row["ttft_s"] > 0


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize(
    "how", [{}, {"pin": "none"}, {"scope": "per-layer"}, {"scope": (1.0, 2.5)}]
)
@pytest.mark.parametrize("capacity", [2, 5, 8, 14])
@pytest.mark.parametrize("name", ["lru", "fifo"])
def test_times_are_those_of_the_event_machine(name, capacity, how, lanes):
    """Also where a step is larger than its cache, and waits for slots of its own."""
    trace = small.trace(MIXED, seed=capacity)
    links = (dataclasses.replace(COSTS.links[0], lanes=lanes), Link(9000.0, 0.01))
    costs = dataclasses.replace(COSTS, links=links)
    result = run(trace, capacity, costs, name, **how)
    pieces = Pieces.unsplit(trace.offsets.tolist(), [NBYTES] * 2, [4] * 16)
    order = small.steps(trace, stream(trace, "runtime"))
    unlimited = simulate(order, pieces, capacity, policy(name), costs=costs, **how)
    assert (result.requests, result.misses) == (unlimited.requests, unlimited.misses)
    assert result.bytes_moved == unlimited.bytes_moved
    for field in ("seconds", "stall", "compute"):
        assert getattr(result, field) == pytest.approx(getattr(unlimited, field), rel=1e-9)
    ttft, gaps = times_by_request(trace, np.diff(unlimited.pass_ends, prepend=0.0))
    assert result.ttft == pytest.approx(ttft)
    assert result.gaps == pytest.approx(gaps)


TRACE = small.trace(MIXED * 4, seed=3)


def test_more_bandwidth_is_never_slower():
    seconds = [
        run(TRACE, costs=dataclasses.replace(COSTS, links=(Link(bandwidth, 0.02),))).seconds
        for bandwidth in (100, 1000, 3000, 1e4, 1e5, 1e9)
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


def test_without_misses_there_is_only_computation():
    once = run(TRACE, 16)
    again = run(small.trace(MIXED * 4, seed=3, experts=2, top_k=2), 4)  # all experts, always
    assert once.misses == 16
    assert again.misses == 4
    assert again.stall <= 4 * (NBYTES / 3000 + 0.07 + 1e-9)
    assert again.gaps.max() <= 2 * (COSTS.dense.seconds(1) + 2 * COSTS.expert.seconds(1)) + 1e-9


def test_infinite_bandwidth_never_stalls():
    result = run(TRACE, costs=dataclasses.replace(COSTS, links=(Link(float("inf")),)))
    assert result.misses > 16
    assert result.stall == 0
    assert result.seconds == pytest.approx(result.compute)


@pytest.mark.parametrize("links", [(Link(800.0),), (Link(2e4), Link(700.0, 0.1)), (Link(1e6),)])
def test_a_run_takes_at_least_its_computation_and_its_transfers(links):
    result = run(TRACE, costs=dataclasses.replace(COSTS, links=links))
    slowest = min(link.bandwidth for link in links)
    assert result.seconds >= max(result.compute, result.bytes_moved / slowest) - 1e-9
    assert result.seconds == pytest.approx(result.compute + result.stall)


def test_reset_forgets_between_requests():
    persistent, reset = run(TRACE), run(TRACE, reset=True)
    assert reset.misses > persistent.misses
    separate = [run(TRACE.select([r])).misses for r in range(TRACE.requests)]
    assert reset.misses == sum(separate)
    odd = run(TRACE, 3, reset=True)  # smaller than a step: decided one by one
    assert odd.misses == sum(run(TRACE.select([r]), 3).misses for r in range(TRACE.requests))
