"""Answers that end before their time, and the end of the engine."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from greenroom.errors import (
    ClosedError,
)
from tests.server.rig import PATIENCE, Heard, draw, greedy


def test_a_place_is_free_within_one_token(served: Any) -> None:
    s = served(max_batch=1)
    heard = Heard()
    heard.on_token = lambda token: heard.cancel() if len(heard.tokens) == 3 else None
    s.ask(draw(4), 200, heard=heard)
    next_ = s.ask(draw(5, 1), 2)
    assert heard.end().reason == "cancelled"
    assert len(heard.tokens) == 3
    assert next_.end().reason == "length"
    heard.cancel()  # nothing where it has finished
    assert s.engine.stats()["kv"]["reserved_bytes"] == 0


def test_what_nobody_waits_for_is_not_fetched_any_more(served: Any) -> None:
    s = served(capacity=2, store={"latency": 0.05})
    begun = threading.Event()
    read = s.store.read
    s.store.read = lambda *args: (begun.set(), read(*args))[1]
    heard = s.ask(draw(40), 4)
    assert begun.wait(PATIENCE)
    heard.cancel()
    assert heard.end().reason == "cancelled"
    reads = s.store.reads
    assert reads < 16  # the prompt would take every expert of every layer
    s.store.read = read
    assert s.ask(draw(3, 1), 2).end().reason == "length"


def test_who_waits_in_the_queue_can_leave_it(served: Any) -> None:
    s = served(max_batch=1, store={"latency": 0.005}, capacity=2)
    first, second = s.ask(draw(4), 150), s.ask(draw(4, 1), 5)
    second.cancel()
    finished = second.end()
    assert (finished.reason, finished.ttft_s, finished.new_tokens) == ("cancelled", None, 0)
    assert first.finished is None
    first.cancel()


def test_an_answer_has_its_time(served: Any) -> None:
    s = served(max_batch=1, store={"latency": 0.005}, capacity=2)
    first, second = s.ask(draw(4), 250, timeout_s=0.6), s.ask(draw(4, 1), 5, timeout_s=0.1)
    assert second.end().reason == "timeout"
    assert second.ids == []
    finished = first.end()
    assert finished.reason == "timeout"
    assert 0 < finished.new_tokens < 250
    assert 0.6 <= finished.duration_s < 10


def test_a_listener_that_fails_loses_its_own_answer_alone(served: Any, model: Any) -> None:
    s = served()

    def broken(told: object) -> None:
        raise RuntimeError("it hung up")

    other = s.ask(draw(7), 12)
    s.ask(draw(4, 1), 12, heard=broken)  # type: ignore[arg-type]
    assert other.end().reason == "length"
    assert other.ids == greedy(model, draw(7), 12)
    until = time.monotonic() + PATIENCE
    while s.engine.running and time.monotonic() < until:
        time.sleep(0.01)
    assert s.engine.stats()["requests"] == {"length": 1, "error": 1}


def test_running_answers_get_their_time_and_then_it_is_over(served: Any) -> None:
    s = served(store={"latency": 0.003}, capacity=2)
    short, long = s.ask(draw(4), 3), s.ask(draw(4, 1), 290)
    assert long.first.wait(PATIENCE)
    s.engine.stop(0.3)
    assert short.end().reason == "length"
    assert long.end().reason == "stopping"
    assert s.engine.state()[0] == "stopping"
    with pytest.raises(ClosedError, match="the engine is stopping"):
        s.ask(draw(3), 2)
    with pytest.raises(ClosedError, match="detached"):
        s.engine.model.greenroom.resize("50%")
    stats = s.engine.stats()
    assert stats["queue"]["running"] == 0
    assert stats["experts"]["requests"] > 0  # as it was at the end
