"""Reads between requests, worked by hand: 3 layers of 4 experts; pieces 4 to 7 are layer 1's."""

from __future__ import annotations

import numpy as np

from greenroom.core.events import Failed, Idle, Resized
from tests.core.prefetch.test_prefetching import ManualDriver, ids

EVERY = np.arange(12)


def idle(driver: ManualDriver, *pieces: int) -> list[int]:
    """The pieces whose reads begin at once."""
    return [piece for piece, _, _ in driver.started(Idle(ids(*pieces)))]


def test_free_slots_are_filled_in_the_order_that_is_given() -> None:
    driver = ManualDriver(capacity=8, lanes=2)
    driver.step(0, 1)
    assert idle(driver, 6, 1, 5, 0) == [6, 5]
    assert [driver.started(driver.landed())[0][0], driver.started(driver.landed())] == [0, []]
    driver.settle()
    assert driver.residents == [0, 1, 5, 6]
    assert (driver.s.counts.idle, driver.s.counts.idle_used) == (3, 0)


def test_nothing_is_evicted() -> None:
    for ahead in (0, 2):
        driver = ManualDriver(capacity=8, ahead=ahead)
        for layer in range(3):
            driver.step(layer, 4 * layer, 4 * layer + 1)
        driver.send(Idle(EVERY))
        driver.settle()
        assert driver.residents == [0, 1, 2, 3, 4, 5, 8, 9]
        assert idle(driver, 10, 11) == []


def test_slots_of_each_layer_are_filled_by_themselves() -> None:
    driver = ManualDriver(capacity=6, scope="per-layer")
    driver.send(Idle(EVERY))
    driver.settle()
    assert driver.residents == [0, 1, 4, 5, 8, 9]


def test_a_request_ends_the_reads_and_waits_for_one_chunk_a_lane() -> None:
    driver = ManualDriver(capacity=8, chunks=3)
    assert driver.started(Idle(ids(5, 6, 7))) == [(5, 0, False)]
    driver.route(0, 0)
    assert driver.started(driver.landed()) == [(0, 0, True)]
    assert [driver.started(driver.landed())[0][0] for _ in range(3)] == [0, 0, 5]
    driver.finish([])
    driver.settle()
    assert driver.residents == [0, 5]  # what had begun is completed; 6 and 7 are not read


def test_the_end_of_idle_time_stops_reads_before_the_first_layer() -> None:
    driver = ManualDriver(capacity=8)
    driver.send(Idle(EVERY))
    driver.s.idle.end()
    driver.settle()
    assert driver.residents == [0]


def test_a_read_under_way_becomes_the_demand_of_its_layer() -> None:
    driver = ManualDriver(capacity=8, chunks=2)
    driver.send(Idle(ids(1, 2)))
    driver.step(0, 1)
    counts = driver.s.counts
    assert (counts.late, counts.idle, counts.idle_used, counts.misses) == (1, 0, 0, 1)
    assert driver.residents == [1]


def test_a_read_under_way_that_its_layer_does_not_choose_is_dropped() -> None:
    driver = ManualDriver(capacity=8, chunks=2)
    driver.send(Idle(ids(1)))
    driver.step(0, 2)
    assert (driver.s.counts.dropped, driver.s.counts.idle) == (1, 0)
    assert driver.residents == [2]


def test_an_expert_counts_as_used_at_its_first_request_alone() -> None:
    driver = ManualDriver(capacity=8)
    driver.send(Idle(ids(1, 2)))
    driver.settle()
    driver.step(0, 1)
    driver.step(0, 1)
    counts = driver.s.counts
    assert (counts.idle, counts.idle_used, counts.hits) == (2, 1, 2)


def test_an_expert_that_was_evicted_before_its_request_does_not_count_as_used() -> None:
    driver = ManualDriver(capacity=3, ahead=0)
    driver.send(Idle(ids(1)))
    driver.settle()
    driver.step(1, 4, 5, 6)
    driver.step(0, 1)
    driver.step(0, 1)
    assert (driver.s.counts.idle, driver.s.counts.idle_used) == (1, 0)


def test_uses_are_counted_where_all_experts_are_resident() -> None:
    driver = ManualDriver(capacity=12, ahead=0)
    driver.step(0, 0)
    driver.send(Idle(EVERY))
    driver.settle()
    path = driver.s.resident_steps.path
    assert path is not None
    assert path.step(ids(5, 6)) is not None
    assert (driver.s.counts.idle, driver.s.view.counted().idle_used) == (11, 2)
    driver.send(Resized(10))  # ends the path
    assert driver.s.view.counted().idle_used == driver.s.counts.idle_used == 2


def test_a_prompt_after_reads_without_prefetching_inserts_every_miss() -> None:
    driver = ManualDriver(capacity=8, ahead=0, chunks=2)
    driver.send(Idle(ids(4)))  # under way when the prompt comes
    driver.step(0, 0, 1, 2, prefill=True)
    assert driver.residents[:3] == [0, 1, 2]


def test_a_read_that_fails_leaves_its_slot_free() -> None:
    driver = ManualDriver(capacity=8)
    driver.send(Idle(ids(1, 2)))
    driver.send(driver.landed(Failed))
    driver.settle()
    assert driver.residents == [2]
    assert driver.free == 7
    assert (driver.s.counts.failed, driver.s.counts.idle) == (1, 1)


def test_a_resize_ends_the_reads_under_way() -> None:
    driver = ManualDriver(capacity=8, chunks=2)
    driver.send(Idle(EVERY))
    driver.send(Resized(6))
    driver.settle()
    assert driver.s.capacity == 6
    assert driver.residents == []
    driver.send(Idle(EVERY))
    driver.settle()
    assert driver.residents == [0, 1, 2, 3, 4, 5]
