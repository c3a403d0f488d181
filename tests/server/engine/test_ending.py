"""Cancelled answers, timeouts, and the end of the engine."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from greenroom.errors import (
    ClosedError,
)
from tests.server.rig import PATIENCE, AnswerRecorder, draw, greedy


def test_a_cancelled_request_frees_its_place_within_one_token(served: Any) -> None:
    s = served(max_batch=1)
    recorder = AnswerRecorder()
    recorder.on_token = lambda token: recorder.cancel() if len(recorder.tokens) == 3 else None
    s.ask(draw(4), 200, recorder=recorder)
    next_ = s.ask(draw(5, 1), 2)
    assert recorder.end().reason == "cancelled"
    assert len(recorder.tokens) == 3
    assert next_.end().reason == "length"
    recorder.cancel()  # nothing where it has finished
    assert s.engine.stats()["kv"]["reserved_bytes"] == 0


def test_experts_of_a_cancelled_prompt_are_not_read(served: Any) -> None:
    s = served(capacity=2, store={"latency": 0.05})
    begun = threading.Event()
    read = s.store.read
    s.store.read = lambda *args: (begun.set(), read(*args))[1]
    recorder = s.ask(draw(40), 4)
    assert begun.wait(PATIENCE)
    recorder.cancel()
    assert recorder.end().reason == "cancelled"
    reads = s.store.reads
    assert reads < 16  # the prompt would take every expert of every layer
    s.store.read = read
    assert s.ask(draw(3, 1), 2).end().reason == "length"


def test_a_queued_request_can_be_cancelled(served: Any) -> None:
    s = served(max_batch=1, store={"latency": 0.005}, capacity=2)
    first, second = s.ask(draw(4), 150), s.ask(draw(4, 1), 5)
    second.cancel()
    finished = second.end()
    assert (finished.reason, finished.ttft_s, finished.new_tokens) == ("cancelled", None, 0)
    assert first.finished is None
    first.cancel()


def test_an_answer_ends_at_its_timeout(served: Any) -> None:
    s = served(max_batch=1, store={"latency": 0.005}, capacity=2)
    first, second = s.ask(draw(4), 250, timeout_s=0.6), s.ask(draw(4, 1), 5, timeout_s=0.1)
    assert second.end().reason == "timeout"
    assert second.ids == []
    finished = first.end()
    assert finished.reason == "timeout"
    assert 0 < finished.new_tokens < 250
    assert 0.6 <= finished.duration_s < 10


def test_a_failing_listener_ends_only_its_answer(served: Any, model: Any) -> None:
    s = served()

    def broken(event: object) -> None:
        raise RuntimeError("it hung up")

    other = s.ask(draw(7), 12)
    s.ask(draw(4, 1), 12, recorder=broken)  # type: ignore[arg-type]
    assert other.end().reason == "length"
    assert other.ids == greedy(model, draw(7), 12)
    until = time.monotonic() + PATIENCE
    while s.engine.running and time.monotonic() < until:
        time.sleep(0.01)
    assert s.engine.stats()["requests"] == {"length": 1, "error": 1}


def test_running_answers_get_the_grace_period(served: Any) -> None:
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
