"""Predictions during the passes of a running driver."""

from __future__ import annotations

import itertools
import threading

import pytest

from greenroom.errors import ClosedError, StoreError
from greenroom.runtime.driver.predictions import Predictions
from tests.runtime.rig import ahead, in_time, threads


def test_a_predicted_expert_is_resident_when_its_layer_needs_it(rig):
    r = ahead(rig, lambda layer: [3, 4] if layer == 1 else [])
    r.begin()
    r.step(0, 0)
    r.settle()
    r.step(1, 3)
    counts = r.scheduler.counts
    assert (counts.prefetches, counts.useful, counts.misses) == (2, 1, 1)
    assert counts.wasted == 1
    r.check()


def test_a_failed_prefetch_raises_no_error(rig):
    """Reads: the demand of layer 0, the prefetch that fails, the demand of layer 1 twice."""
    r = ahead(rig, lambda layer: [3] if layer == 1 else [], fails=lambda read: read == 2,
              chunk_bytes=1 << 20, lanes=1)  # fmt: skip
    r.begin()
    r.step(0, 0)
    r.settle()
    assert r.scheduler.counts.failed == 1
    r.step(1, 3)
    r.check()


def test_a_late_prefetch_that_fails_is_tried_again_by_its_demand(rig):
    requested = threading.Event()

    def fails(read: int) -> bool:
        return read == 2 and requested.wait(20)

    r = ahead(rig, lambda layer: [3] if layer == 1 else [], fails=fails, chunk_bytes=1 << 20,
              lanes=1)  # fmt: skip
    r.begin()
    r.step(0, 0)
    r.step(1, 3, overlapped_work=requested.set)
    assert (r.scheduler.counts.late, r.scheduler.counts.failed) == (1, 0)
    assert r.store.reads == 3
    r.check()


def test_a_demand_that_fails_after_its_prefetch_fails_only_its_step(rig):
    r = ahead(rig, lambda layer: [3] if layer == 1 else [], fails=lambda read: read in (2, 3),
              chunk_bytes=1 << 20, latency=0.02, lanes=1)  # fmt: skip
    r.begin()
    r.step(0, 0)
    with pytest.raises(StoreError, match=r"read number [23] failed"):
        r.step(1, 3)
    r.step(1, 3)
    r.settle()
    r.check()


def test_the_driver_closes_while_prefetches_are_in_flight(rig):
    before = threads()
    r = ahead(rig, lambda layer: [3, 4], latency=0.05)
    r.begin()
    r.step(0, 0)
    assert len(r.scheduler.transfers.entries)
    in_time(r.driver.close)
    assert threads() == before
    with pytest.raises(ClosedError):
        r.step(1, 3)


def test_a_predictor_that_raises_ends_prefetching_and_nothing_else(rig, caplog):
    def say(layer: int) -> list[int]:
        if layer == 2:
            raise ZeroDivisionError("no idea")
        return [3] if layer == 1 else []

    r = ahead(rig, say)
    for _ in range(3):
        r.begin()
        r.step(0, 0)
        r.step(1, 3)
        r.driver.end_pass()
    r.settle()
    r.check()
    assert r.scheduler.counts.prefetches == 1
    (message,) = caplog.messages
    assert "scripted" in message
    assert "no idea" in message
    assert "\n" not in message


def test_a_predictor_observes_no_pass_whose_beginning_it_missed(rig):
    """The pass began while every expert had a slot, so its number of tokens is unknown."""
    r = ahead(rig, lambda layer: [], capacity=16)
    observed = []
    r.driver.predictions.foresight.predictor.begin = lambda at: observed.append(
        f"{at.tokens} tokens"
    )
    r.driver.predictions.foresight.predictor.observe = lambda routing: observed.append(
        routing.layer
    )
    r.begin(prefill=True, tokens=5)
    r.step(0, 0)
    r.driver.resize(8)
    r.step(1, 3)
    r.driver.end_pass()
    assert observed == []
    r.begin()
    r.step(0, 0)
    r.driver.resize(16)  # the end may be missed
    r.step(1, 3)
    r.driver.end_pass()
    r.driver.resize(8)
    r.step(0, 0)  # of no pass
    assert observed == ["1 tokens", 0]


def test_a_slow_disk_is_waited_for_and_a_demand_overtakes_prefetches(rig):
    """Chunks take 60 ms each; at most one is on the lane when the demand comes."""
    r = ahead(rig, lambda layer: [3, 4] if layer == 1 else [], latency=0.06, lanes=1)
    r.begin()
    r.step(0, 0)  # of layer 1 experts 3 and 4 are fetched now, three chunks each
    before = r.store.reads
    r.step(0, 1)
    assert r.store.reads - before <= 3 + 2  # the demand's, one on the way, one begun since
    assert r.driver.meter.stalls["miss"] >= 6 * 0.06
    r.settle()
    r.check()
    assert r.driver.meter.links[0].busy_s >= 0.06 * r.store.reads


def test_the_guard_observes_decode_and_decides_for_the_next_pass(rig):
    r = ahead(rig, lambda layer: [3], guard=True)
    observed = []

    class Never:
        on, verdict = False, "no"

        def passed(self, seconds: float, stall_s: float, tokens: int) -> None:
            observed.append((seconds > stall_s >= 0, tokens))

    r.driver.predictions.guard = Never()
    for prefill, tokens in ((True, 5), (False, 1), (False, 1)):
        r.begin(prefill, tokens)
        r.step(0, 0)
        r.step(1, 1)
        began = r.scheduler.counts.prefetches
        r.driver.end_pass()
    assert observed == [(True, 1), (True, 1)]
    assert r.driver.predictions.foresight.on is False
    r.begin()
    r.step(0, 1)
    assert r.scheduler.counts.prefetches == began


@pytest.mark.parametrize("worker", [False, True])
def test_a_predictor_observes_steps_that_need_no_event(rig, worker):
    """While the guard says off, steps whose experts are resident are served at once."""
    r = ahead(rig, lambda layer: [3], guard=True, worker=worker)
    predictions, observed, handled = r.driver.predictions, [], []
    predictions.foresight.predictor.observe = lambda routing: observed.append(routing.layer)
    predictions.start_off()
    for _ in range(2):
        r.begin()
        for layer in (0, 1):
            r.step(layer, 0)
        handle, r.driver._handle = r.driver._handle, handled.append  # of the second pass
        r.driver.end_pass()
        predictions.drain()
    r.driver._handle = handle
    assert observed == [0, 1] * 2
    assert handled == []
    assert r.scheduler.counts.prefetches == 0
    assert not predictions.foresight.on


def test_a_driver_without_a_guard_always_predicts(rig):
    r = ahead(rig, lambda layer: [3])
    r.driver.predictions.start_off()
    assert r.driver.predictions.predicts
    r.driver.resize(16)
    assert not r.driver.predictions.predicts


def test_a_predictor_that_fails_in_its_worker_ends_no_step(rig, monkeypatch):
    """It is removed while a step asks for it: here after each time that the step looks for it."""
    r = ahead(rig, lambda layer: [], worker=True)
    r.begin()
    r.driver.predictions.drain()
    foresight = r.driver.predictions.foresight
    looks = itertools.cycle([foresight, None])
    look = property(lambda self: next(looks), lambda self, value: None)
    monkeypatch.setattr(Predictions, "foresight", look, raising=False)
    for layer in (0, 1):
        r.step(layer, 0)
    monkeypatch.undo()
    r.settle()
    r.check()
