"""Misses shared out between a device and the host: hand-worked cases, and the law of the choice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.cost import Costs, Link, Work
from greenroom.core.events import HOST
from greenroom.core.options.rules.processors import (
    Miss,
    Queues,
    assign,
    count_on_host,
    end_with,
)
from greenroom.core.options.rules.rates import Rates
from greenroom.errors import UsageError

BYTES = 100


def rates(bus: float = 1.0, host: float = 2.0, disk: float = 5.0, device: float = 0.0, **more):
    """Rates: seconds of an expert on the bus, the host (a token), the disk, the device."""
    links = Link(BYTES / disk), Link(BYTES / bus)
    a_token = Work(((1, host), (1000, 1000 * host)))
    costs = Costs(links, Work.constant(device), Work.constant(0.0), host=a_token)
    return Rates(costs, BYTES, **more)


def misses(run_rates: Rates, *rows: int, cached: bool = True) -> list[Miss]:
    return [run_rates.miss(request, n, BYTES, cached, 0) for request, n in enumerate(rows)]


def on_host(run_rates: Rates, *rows: int) -> list[int]:
    """Indices of the misses that an idle host computes."""
    return assign(misses(run_rates, *rows), Queues.empty())


def test_device_and_host_end_at_the_same_time():
    """Three moves of 1 s, or 2 s each on the host: two are moved, one stays, and all ends at 2."""
    queues, three = Queues.empty(), misses(rates(), 1, 1, 1)
    assert len(assign(three, queues)) == 1
    assert end_with(three, assign(three, queues), queues) == 2.0
    assert end_with(three, [], queues) == 3.0
    assert end_with(three, [0, 1, 2], queues) == 6.0


def test_the_host_computes_experts_with_few_tokens():
    """Every expert takes the link equally long; on the host 9 tokens take 18 s."""
    assert on_host(rates(bus=1.0), 9, 1, 1, 9) in ([1], [2])
    assert on_host(rates(bus=2.0), 9, 1, 1, 9) == [1, 2]
    assert on_host(rates(bus=5.0), 9, 1, 1, 9) == [1, 2]


def test_a_single_miss_is_computed_where_it_ends_sooner_and_moved_if_equal():
    for bus, chosen in ((1.9, []), (2.0, []), (2.1, [0])):
        assert on_host(rates(bus=bus, host=2.0), 1) == chosen


def test_transfers_queued_for_the_link_delay_a_move():
    """A prefetch's chunk is on the link for 1.5 s: moved, the miss would be there at 2.5."""
    one = misses(rates(), 1)
    assert assign(one, Queues(0.0, [1.5], [0.0])) == [0]
    assert assign(one, Queues(0.0, [0.5], [0.0])) == []


def test_the_device_s_queue_counts_only_if_it_delays_the_miss():
    """The device computes hits until 10 s, then the miss for 1 s; the host is done at 2."""
    busy, one = Queues(0.0, [0.0], [10.0]), misses(rates(device=1.0), 1)
    assert assign(one, busy) == [0]
    assert end_with(one, [0], busy) == 10.0
    assert end_with(one, [], busy) == 11.0


def test_an_expert_outside_host_memory_is_read_from_disk_for_device_and_host():
    run_rates, queues = rates(disk=5.0, bus=1.0, host=2.0), Queues.empty()
    cold = misses(run_rates, 1, 1, cached=False)
    assert end_with(cold, [], queues) == 11.0  # read by 5 and 10, moved a second later each
    assert end_with(cold, [0, 1], queues) == 12.0
    assert assign(cold, queues) == []
    mixed = [run_rates.miss(0, 1, BYTES, False, 0), run_rates.miss(1, 1, BYTES, True, 0)]
    assert end_with(mixed, [], queues) == 6.0  # what is there goes first, whatever its number


def test_each_device_has_a_link_of_its_own():
    """Two misses of one device and one of the other: the host takes one of the first's."""
    run_rates, queues = rates(host=1.5, devices=2), Queues.empty(2)
    three = [run_rates.miss(n, 1, BYTES, True, home) for n, home in enumerate((0, 0, 1))]
    assert end_with(three, [], queues) == 2.0
    assert assign(three, queues) in ([0], [1])
    assert end_with(three, assign(three, queues), queues) == 1.5


def test_an_expert_of_half_the_bytes_takes_half_as_long():
    half = [rates().miss(0, 1, BYTES // 2, True, 0)]
    assert end_with(half, [], Queues.empty()) == 0.5
    assert end_with(half, [0], Queues.empty()) == 1.0


@given(
    requests=st.lists(
        st.tuples(st.integers(1, 40), st.booleans(), st.integers(0, 1)), min_size=1, max_size=12
    ),
    speeds=st.tuples(*[st.floats(0.01, 10.0)] * 4),
    ends=st.tuples(*[st.floats(0.0, 20.0)] * 5),
)
@settings(max_examples=400, deadline=None)
def test_a_step_never_ends_later_than_with_everything_moved_or_nothing(requests, speeds, ends):
    run_rates = rates(*speeds, devices=2)
    every = [
        run_rates.miss(n, rows, BYTES, cached, d) for n, (rows, cached, d) in enumerate(requests)
    ]
    queues = Queues(ends[0], list(ends[1:3]), list(ends[3:]))
    before = queues.copy()
    chosen = assign(every, queues)
    assert queues == before  # it only looks
    assert chosen == sorted(set(chosen))
    least = min(end_with(every, (), queues), end_with(every, range(len(every)), queues))
    assert end_with(every, chosen, queues) <= least


@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    speeds=st.tuples(*[st.floats(0.1, 10.0)] * 2),
)
@settings(max_examples=200, deadline=None)
def test_no_choice_ends_sooner_if_all_misses_have_one_token(rows, speeds):
    """Alike as they are, only how many of them stay matters."""
    alike, queues = misses(rates(*speeds), *[1] * len(rows)), Queues.empty()
    best = min(end_with(alike, range(n), queues) for n in range(len(alike) + 1))
    assert end_with(alike, assign(alike, queues), queues) == pytest.approx(best)


# ---- what is seen while it runs


def test_a_correction_converges_to_the_measured_ratio():
    slow = rates(host=2.0)
    for _ in range(60):
        slow.computed(HOST, [1, 1], BYTES, 8.0)  # twice as long as expected
    assert slow.processor(HOST, [1], BYTES) == pytest.approx(4.0, rel=0.01)
    assert slow.processor(0, [1], BYTES) == 0.0
    assert on_host(slow, 1) == []


def test_a_link_s_rate_is_measured_between_consecutive_chunks():
    observed_rates = rates(bus=1.0)
    for n in range(80):  # two lanes: each chunk takes 4 s, one lands every 2
        observed_rates.chunk_started(1, n % 2, 2.0 * n - 2.0)
        observed_rates.chunk_landed(1, n % 2, BYTES, 2.0 * n + 2.0)
    assert observed_rates.link(1, BYTES) == pytest.approx(2.0, rel=0.01)
    assert observed_rates.link(0, BYTES) == 5.0


def test_an_outlier_is_clipped_and_an_unused_correction_fades():
    host = rates(host=2.0)
    host.computed(HOST, [1], BYTES, 1e6)
    assert host.processor(HOST, [1], BYTES) <= 2.0 * 1.31
    for _ in range(60):
        host.computed(HOST, [1], BYTES, 20.0)
    assert host.processor(HOST, [1], BYTES) > 15.0
    for _ in range(600):
        host.host_unused()
    assert host.processor(HOST, [1], BYTES) == pytest.approx(2.0, rel=0.05)


def test_rates_that_do_not_learn_stay_constant():
    sure = rates(learn=False)
    sure.computed(HOST, [1], BYTES, 80.0)
    sure.chunk_started(1, 0, 0.0)
    sure.chunk_landed(1, 0, BYTES, 9.0)
    assert (sure.processor(HOST, [1], BYTES), sure.link(1, BYTES)) == (2.0, 1.0)


def test_costs_without_a_host_processor_are_refused():
    own_links = Costs((Link(1.0), Link(1.0)), Work.constant(1.0), Work.constant(0.0))
    with pytest.raises(UsageError, match="between a device and the host's processor"):
        Rates(own_links, BYTES)
    one = Costs((Link(1.0),), Work.constant(1.0), Work.constant(0.0), host=Work.constant(1.0))
    with pytest.raises(UsageError, match="from disk to host to device"):
        Rates(one, BYTES)


@settings(deadline=None, max_examples=300)
@given(
    st.integers(1, 12), st.sampled_from((0.3, 0.9, 1.0, 2.0, 7.0)),
    st.sampled_from((0.0, 0.2, 1.0)), st.sampled_from((0.3, 1.0, 2.0)),
    st.floats(0, 5), st.floats(0, 5),
)  # fmt: skip
def test_equal_misses_are_divided_as_any_others(count, bus, device, host, link_s, device_s):
    made = rates(bus=bus, host=host, device=device)
    queues = Queues(0.0, [link_s], [device_s])
    chosen = assign(misses(made, *[1] * count), queues)
    found = count_on_host(count, made.miss(0, 1, BYTES, True, 0), queues)
    assert chosen == [*range(count - found, count)]
    assert queues == Queues(0.0, [link_s], [device_s])
