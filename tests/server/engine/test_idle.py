"""Experts that an engine reads between requests, while slots are free."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from greenroom.config import LoadConfig, ServeConfig
from greenroom.server.engine.start import start
from tests.server.rig import PATIENCE, Served, draw, greedy

SLOW = {"jitter": 0.02}


def reads(s: Served) -> int:
    """The number of experts that were read between requests."""
    return int(s.engine.stats()["prefetch"]["idle"])


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, "it never happens"
        time.sleep(0.002)


@pytest.mark.parametrize("capacity", [8, 16])
def test_free_slots_are_filled_before_the_first_request(
    served: Any, model: Any, capacity: int
) -> None:
    s = served(capacity=capacity)
    wait_for(lambda: reads(s) == capacity)
    assert s.engine.greenroom.driver.scheduler.residents().tolist() == list(range(capacity))
    answer = s.ask(draw(9), 12)
    assert answer.end().reason == "length"
    assert answer.ids == greedy(model, draw(9), 12)
    stats = s.engine.stats()
    assert 0 < stats["prefetch"]["idle_used"] <= reads(s) == capacity
    if capacity == 16:
        assert stats["experts"]["hit_ratio"] == 1.0


def test_reads_between_requests_can_be_switched_off(served: Any) -> None:
    s = served(no_idle_prefetch=True)
    s.ask(draw(2), 1).end()
    time.sleep(0.05)
    before = s.engine.stats()["experts"]["bytes_read"]
    time.sleep(0.05)
    stats = s.engine.stats()
    assert (stats["prefetch"]["idle"], stats["experts"]["bytes_read"]) == (0, before)


def test_without_prefetching_nothing_is_read_between_requests(folder: Any) -> None:
    engine = start(str(folder), LoadConfig(cache="50%", prefetch="off", context=64), ServeConfig())
    try:
        wait_for(lambda: engine.state()[0] == "ready")
        assert engine.config.no_idle_prefetch
    finally:
        engine.stop(0.0)


def test_requests_interrupt_the_reads_and_get_the_same_answers(served: Any, model: Any) -> None:
    for seed in range(4):
        s = served(capacity=16, store=SLOW | {"seed": seed})
        wait_for(lambda s=s, seed=seed: reads(s) >= seed)
        answer = s.ask(draw(5, seed), 3)
        answer.end()
        during = reads(s)
        assert answer.ids == greedy(model, draw(5, seed), 3)
        resident = s.engine.greenroom.driver.scheduler.residents
        wait_for(lambda resident=resident: resident().size == 16)  # it goes on
        assert reads(s) >= during


def test_no_read_begins_while_a_request_is_computed(served: Any) -> None:
    s = served(capacity=16, store=SLOW)
    driver, begun = s.engine.greenroom.driver, []

    def note(token: Any) -> None:  # in the engine's thread, after a pass
        begun.append(driver.scheduler.idle.candidates)

    answer = s.ask(draw(3), 20)
    answer.on_token = note
    answer.end()
    assert not any(begun)


def test_reads_that_fail_between_requests_end_no_request(served: Any, model: Any) -> None:
    s = served(capacity=16, store={"fails": lambda read: read < 10})

    def ended(what: str) -> int:
        return int(s.engine.stats()["prefetch"][what])

    wait_for(lambda: ended("failed") + ended("idle") == 16)
    assert 5 <= ended("failed") <= 9  # an expert has two chunks, which may both fail
    answer = s.ask(draw(5), 6)
    assert answer.end().reason == "length"
    assert answer.ids == greedy(model, draw(5), 6)


def test_slots_that_a_resize_adds_are_filled(served: Any) -> None:
    s = served(capacity=4)
    wait_for(lambda: reads(s) == 4)
    s.engine.resize("100%")
    wait_for(lambda: reads(s) == 16)


def test_experts_are_read_by_their_expected_use(served: Any) -> None:
    s = served(no_idle_prefetch=True)
    greenroom = s.engine.greenroom
    order = greenroom._warm_start.expected_use
    np.testing.assert_array_equal(order(), np.arange(16))
    s.ask(draw(2), 6).end()
    requests = greenroom.driver.request_counts[order()]
    assert requests[0] > requests[-1]
    assert (np.diff(requests) <= 0).all()
    assert sorted(order()) == list(range(16))
