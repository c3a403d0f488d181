from __future__ import annotations

import random

import pytest

from greenroom.core.cost import Chain, Link, Work


def test_work_lies_on_lines_between_points_and_grows_in_proportion_after_them():
    work = Work(((2, 1.0), (4, 3.0), (8, 5.0)))
    assert [work.seconds(n) for n in (1, 2, 3, 4, 6, 8, 16)] == [1, 1, 2, 3, 4, 5, 10]


def test_constant_work():
    assert [Work.constant(0.5).seconds(n) for n in (1, 7, 10**9)] == [0.5, 0.5, 0.5]


def test_a_link_carries_one_chunk_after_another_and_latencies_overlap():
    chain = Chain([Link(bandwidth=100, latency=2.0)])
    assert [chain.send(100, 0.0) for _ in range(3)] == [3.0, 4.0, 5.0]
    assert chain.send(100, 10.0) == 13.0  # idle in between


def test_a_chain_passes_chunks_on_when_they_are_whole():
    """Disk 1 s a chunk and 0.5 s late, then a bus of 0.25 s a chunk: they overlap."""
    chain = Chain([Link(100, latency=0.5), Link(400)])
    assert [chain.send(100, 0.0) for _ in range(3)] == [1.75, 2.75, 3.75]


def test_a_slow_second_link_is_a_queue():
    chain = Chain([Link(100), Link(50)])
    assert [chain.send(100, 0.0) for _ in range(3)] == [3.0, 5.0, 7.0]


@pytest.mark.parametrize("seed", range(5))
def test_no_chunk_comes_sooner_over_slower_links(seed: int):
    rng = random.Random(seed)
    fast = [Link(rng.uniform(1, 9), rng.random()) for _ in range(3)]
    slow = [Link(link.bandwidth * 0.9, link.latency * 1.1) for link in fast]
    a, b, now = Chain(fast), Chain(slow), 0.0
    for _ in range(50):
        now += rng.random()
        nbytes = rng.randint(1, 9)
        assert a.send(nbytes, now) < b.send(nbytes, now)
