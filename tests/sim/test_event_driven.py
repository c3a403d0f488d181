"""Prefetching in simulated time: by hand, against the plain times, laws, and pinned counts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from greenroom.core.config.scheduler import SchedulerConfig
from greenroom.core.cost import Costs, Link, Work
from greenroom.errors import UsageError
from greenroom.policies import policy
from greenroom.sim.event_driven import EventOptions, EventRun, simulate_events
from greenroom.sim.foresight import resolve_predictor
from greenroom.sim.timed import time_trace
from greenroom.trace import Prediction, stream
from tests.sim import small

NBYTES = 1000
MIXED = [[-5, 1, 1, 1], [-1, 1], [-3, -9, 1, 1], [1, 1], [-20, 1, 1, 1, 1]]
COSTS = Costs(
    (Link(3000.0, 0.07),), Work(((1, 0.1), (4, 0.15), (16, 0.9))), Work(((1, 0.2), (9, 0.5)))
)
ANSWER = small.trace([[-4] + [1] * 50], layers=4, experts=16, top_k=3, seed=1)
ONE_CHUNK = Costs((Link(NBYTES / 0.5, lanes=1),), Work.constant(0.25), Work.constant(2.0))


def run(trace, prefetch: str, capacity: int = 16, costs: Costs = COSTS, **how) -> EventRun:
    how = {"chunk_bytes": 300, "name": "lru", **how}
    requests = stream(trace, "runtime")
    lru = policy(how.pop("name"))
    return simulate_events(
        trace, requests, capacity, lru, costs, NBYTES, prefetch, EventOptions(**how)
    )


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("scope", ["shared", "per-layer", (1.0, 2.5)])
@pytest.mark.parametrize("capacity", [4, 8, 14])
def test_without_borrowed_slots_times_are_those_without_prefetching(capacity, scope, reset, lanes):
    """The event machine is one: with nothing to lend it decides and waits as if nobody predicted,
    whatever is predicted."""
    trace, how = small.trace(MIXED, seed=capacity), {"scope": scope, "reset": reset}
    links = (dataclasses.replace(COSTS.links[0], lanes=lanes), Link(9000.0, 0.01))
    costs = dataclasses.replace(COSTS, links=links)
    plain = time_trace(
        trace, stream(trace, "runtime"), capacity, policy("lru"), costs, NBYTES, chunk_bytes=300,
        **how,
    )  # fmt: skip
    for name in ("none", "oracle"):
        result = run(trace, name, capacity, costs, ahead=0, **how)
        assert (result.counts.prefetches, result.ahead, result.accuracy) == (0, 0, None)
        assert (result.times.requests, result.times.misses) == (plain.requests, plain.misses)
        assert result.times.bytes_moved == plain.bytes_moved
        for field in ("seconds", "stall", "compute", "ttft", "gaps"):
            assert getattr(result.times, field) == pytest.approx(getattr(plain, field), rel=1e-9)


def test_decoding_without_predictions_equals_no_prefetching():
    """Slots that nobody borrows are the cache's: no prompt, no prediction, no difference."""
    trace = small.trace([[1] * 30], seed=2)
    plain = time_trace(
        trace, stream(trace, "runtime"), 8, policy("lru"), COSTS, NBYTES, chunk_bytes=300
    )
    result = run(trace, "none", 8)
    assert result.ahead == 2
    assert (result.times.misses, result.times.bytes_moved) == (plain.misses, plain.bytes_moved)
    assert result.times.gaps == pytest.approx(plain.gaps)


def test_no_slot_is_borrowed_if_all_experts_fit():
    assert run(ANSWER, "oracle", 64).ahead == 0
    assert run(ANSWER, "oracle", 63).ahead == 4 * 3


def test_a_prefetch_hides_a_transfer_by_hand():
    """Two layers, one expert a token; an expert takes 0.5 s to come, 0.25 s to compute, and the
    rest of a layer 2 s. Four slots, one of them may be lent.

    Plain: every step waits 2 s for its layer; a miss takes 0.5 s more, then the expert 0.25 s.
    Token 0 misses 0 and 4: twice 2.75. Token 1 asks for 1 (new) and 4 (there): 2.75 + 2.25.
    Token 2 asks for 1 and 5: 2.25 + 2.75.

    The oracle says what the first layer will need when the pass begins, and of each other as soon
    as the routing of the one before it is known. So an expert has the 2 s of its layer to come, and
    needs 0.5 s of them: nothing is waited for, and each step takes 2.25 s.
    """
    trace = small.of([[[0], [0]], [[1], [0]], [[1], [1]]], [[1, 1, 1]])
    requests = stream(trace, "runtime")
    plain = time_trace(trace, requests, 4, policy("lru"), ONE_CHUNK, NBYTES, chunk_bytes=NBYTES)
    assert plain.ttft.tolist() == pytest.approx([5.5])
    assert plain.gaps.tolist() == pytest.approx([5.0, 5.0])
    result = run(trace, "oracle", 4, ONE_CHUNK, chunk_bytes=NBYTES)
    assert result.ahead == 1
    assert result.times.ttft.tolist() == pytest.approx([4.5])
    assert result.times.gaps.tolist() == pytest.approx([4.5, 4.5])
    assert (result.times.stall, result.times.misses) == (0.0, 0)
    counts = result.counts
    assert (counts.prefetches, counts.useful, counts.late, counts.wasted) == (4, 4, 0, 0)
    assert (result.accuracy, result.goodpred) == (1.0, 1.0)
    assert result.times.bytes_moved == plain.bytes_moved == 4 * NBYTES


def test_a_late_prefetch_is_a_miss_that_waits_less_by_hand():
    """As above, where an expert takes 3 s to come. The first one has come 2 s of its way when it
    is asked for. The second one's begins when the link is free, at 3 s; its layer is routed 2.25 s
    later, and 0.75 s are left to wait."""
    trace = small.of([[[0], [0]]], [[1]])
    slow = dataclasses.replace(ONE_CHUNK, links=(Link(NBYTES / 3.0, lanes=1),))
    result = run(trace, "oracle", 4, slow, chunk_bytes=NBYTES)
    assert (result.counts.late, result.counts.useful, result.times.misses) == (2, 0, 2)
    assert result.times.seconds == pytest.approx(3.0 + 3.0 + 0.25)
    assert result.times.stall == pytest.approx(1.0 + 0.75)
    assert (result.accuracy, result.goodpred) == (1.0, 0.0)


TWO = (Link(5000.0, 0.05, 2), Link(20000.0, 0.01, 1))
CASES = [(name, links) for name in ("markov", "oracle", "oracle:3", "popularity")
         for links in (COSTS.links, TWO)]  # fmt: skip


@pytest.mark.parametrize("capacity", [6, 30])
@pytest.mark.parametrize(("name", "links"), CASES)
def test_counts_and_times_are_consistent(name, links, capacity):
    """What holds whatever is predicted: every prefetch ends once; the clock is computing or
    stalled; nothing is faster than computing, or than its bytes over the slowest link."""
    trace = small.trace(MIXED * 2, layers=4, experts=16, top_k=3, seed=7)
    costs = dataclasses.replace(COSTS, links=links)
    result = run(trace, name, capacity, costs)
    spent, counts = result.times, result.counts
    plain = time_trace(
        trace, stream(trace, "runtime"), capacity, policy("lru"), costs, NBYTES, chunk_bytes=300
    )
    ended = counts.useful + counts.late + counts.wasted + counts.dropped + counts.displaced
    assert 0 <= counts.prefetches - ended <= result.ahead  # the others wait for their layer
    assert counts.failed == 0
    assert spent.requests == plain.requests
    assert spent.compute == pytest.approx(plain.compute)
    assert spent.seconds == pytest.approx(spent.compute + spent.stall)
    assert spent.ttft.sum() + spent.gaps.sum() <= spent.seconds + 1e-9
    # What was not there when it was asked for came then, or had been begun: whole, but for what
    # is still on its way at the end.
    slowest = min(link.bandwidth for link in links)
    assert spent.seconds >= spent.bytes_moved / slowest - result.ahead * NBYTES / slowest - 1e-9
    assert spent.bytes_moved >= (spent.misses - counts.late) * NBYTES
    assert spent.bytes_moved <= (spent.misses - counts.late + counts.prefetches) * NBYTES
    if result.accuracy is not None:
        assert 0.0 <= result.accuracy <= 1.0
        assert result.goodpred is None or 0.0 <= result.goodpred <= 1.0
    if name.startswith("oracle"):
        assert result.accuracy == 1.0


@pytest.mark.parametrize("distance", [1, 2])
@pytest.mark.parametrize("capacity", [16, 32])
def test_no_predictor_beats_the_oracle_at_its_distance(capacity, distance):
    """Not a theorem, since what a wrong prefetch evicts may by luck be no loss: so by a margin of
    two in a hundred. The oracle moves no byte in vain, and nothing else knows more."""
    best = run(ANSWER, f"oracle:{distance}", capacity).times.seconds
    for name in ("none", f"markov:{distance}", f"noisy-oracle:{distance},accuracy=0.5"):
        assert run(ANSWER, name, capacity).times.seconds >= 0.98 * best


def test_better_predictions_stall_less():
    """A step in accuracy that is large against chance: 0, a half, all of it."""
    stalls = [
        run(ANSWER, f"noisy-oracle:1,accuracy={accuracy}", 24).times.stall
        for accuracy in (0.2, 0.6, 1.0)
    ]
    assert stalls == sorted(stalls, reverse=True)
    assert stalls[-1] < 0.8 * stalls[0]


def test_an_infinite_link_leaves_nothing_to_hide():
    costs = dataclasses.replace(COSTS, links=(Link(float("inf")),))
    for name in ("none", "markov", "oracle"):
        assert run(ANSWER, name, 16, costs).times.stall == 0


ONES = small.of([[[t % 4], [(t + 1) % 4]] for t in range(12)], [[1] * 12])


@pytest.mark.parametrize("second", [2000.0, 4000.0, 1e9])
def test_a_chain_of_links_takes_the_time_of_its_links(second):
    """One expert a step, one chunk an expert, room to spare: a transfer is then alone on its chain,
    and takes the sum of its links. Without prefetching all of it is waited for; with the oracle
    nothing, as long as it is less than the layer's 2 s."""
    chain = (Link(NBYTES / 0.5, lanes=1), Link(second, lanes=1))
    costs = dataclasses.replace(ONE_CHUNK, links=chain)
    assert run(ONES, "oracle", 7, costs, chunk_bytes=NBYTES).times.stall == 0
    plain = run(ONES, "none", 7, costs, chunk_bytes=NBYTES)
    assert plain.times.stall == pytest.approx(plain.times.misses * (0.5 + NBYTES / second))


@pytest.mark.parametrize("name", ["none", "oracle"])
def test_faster_links_and_more_lanes_are_never_slower_where_transfers_are_alone(name):
    def seconds(first: Link, second: Link) -> float:
        costs = dataclasses.replace(ONE_CHUNK, links=(first, second))
        return run(ONES, name, 7, costs, chunk_bytes=NBYTES).times.seconds

    slow, fast = Link(400.0, 0.1, 1), Link(4000.0, 0.1, 1)
    by_speed = [seconds(slow, slow), seconds(slow, fast), seconds(fast, fast)]
    assert by_speed == sorted(by_speed, reverse=True)
    lanes = [seconds(Link(400.0, 0.1, n), Link(400.0, 0.1, n)) for n in (1, 2, 4)]
    assert lanes == sorted(lanes, reverse=True)  # a lane brings two staging slots


@pytest.mark.parametrize("links", [COSTS.links, TWO])
@pytest.mark.parametrize("name", ["noisy-oracle:1,accuracy=0.6", "markov"])
def test_the_same_seed_gives_the_same_result(name, links):
    costs = dataclasses.replace(COSTS, links=links)
    one, again = (run(ANSWER, name, 16, costs, seed=3).as_json() for _ in range(2))
    assert one == again
    assert one["prefetches"] > 0


def test_reset_begins_every_request_with_an_empty_cache():
    trace = small.trace([[-4, 1, 1, 1, 1]] * 6, seed=4)
    persistent, reset = run(trace, "oracle", 12), run(trace, "oracle", 12, reset=True)
    counts = reset.counts
    assert reset.times.misses + counts.useful > persistent.times.misses + persistent.counts.useful
    ended = counts.useful + counts.late + counts.wasted + counts.dropped + counts.displaced
    assert 0 <= counts.prefetches - ended <= reset.ahead
    assert reset.times.seconds == pytest.approx(reset.times.compute + reset.times.stall)
    first = run(trace.select([0]), "oracle", 12)
    assert reset.times.ttft[0] == pytest.approx(first.times.ttft[0])
    assert reset.times.requests == persistent.times.requests


def test_recordings_are_found_by_kind_distance_and_options():
    right = Prediction(ANSWER.experts, 2)
    trace = dataclasses.replace(ANSWER, predictions={"next-gate:2": right, "somebody's": right})
    assert resolve_predictor(trace, "next-gate:2").name == "recorded:of=next-gate:2"
    assert resolve_predictor(trace, "auto").name == "markov"  # what a run would take has distance 1
    assert resolve_predictor(trace, "markov:2").name == "markov:2"
    with pytest.raises(
        UsageError, match=r"next-gate needs .*; the trace has next-gate:2, somebody's"
    ):
        resolve_predictor(trace, "next-gate")
    assert run(trace, "next-gate:2").accuracy == 1.0


def test_a_trace_without_data_for_a_predictor_is_an_error():
    with pytest.raises(UsageError, match="needs token ids"):
        run(ANSWER, "token")
    with pytest.raises(UsageError, match="needs a running model"):
        run(ANSWER, "learned")
    ids = np.arange(ANSWER.tokens, dtype=np.int32) % 7
    assert run(dataclasses.replace(ANSWER, token_ids=ids), "token").accuracy is not None


def test_the_fetch_rate_is_the_share_of_prefetches_in_time():
    """Routing is predicted exactly, a layer ahead: a fast link is in time, a slow one is not."""
    trace = small.trace([[-2, 1, 1, 1, 1, 1, 1]], layers=3)
    rates = {}
    for bandwidth in (1e12, 1e3):
        costs = Costs((Link(bandwidth),), Work.constant(1e-3), Work.constant(1e-3))
        run = simulate_events(
            trace, stream(trace, "runtime"), 12, policy("lru"), costs, 1000, "oracle",
            EventOptions(config=SchedulerConfig(prefetch_rule="top-k")),
        )  # fmt: skip
        rates[bandwidth] = run.fetch_rate
        assert run.as_json()["fetch_rate"] == run.fetch_rate
    assert rates[1e12] == 1.0
    assert rates[1e3] < 0.5
