"""A failed read or a broken engine ends only the requests that need it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from greenroom.config import LoadConfig, ServeConfig
from greenroom.errors import (
    ClosedError,
    DeviceError,
    NotAModel,
    StoreError,
)
from greenroom.server.engine.loop import ContinuousEngine
from greenroom.server.engine.requests import Busy
from greenroom.server.engine.start import start
from tests.server.rig import PATIENCE, draw, greedy


def test_a_read_that_fails_once_ends_no_request(served: Any, model: Any) -> None:
    failing = {"fails": lambda read: read in (7, 30, 31)}
    s = served(capacity=4, store=failing)
    recorders = [s.ask(draw(6, seed), 8) for seed in range(3)]
    for seed, each in enumerate(recorders):
        assert each.end().reason == "length"
        assert each.ids == greedy(model, draw(6, seed), 8)
    assert s.engine.stats()["passes"]["faults"] >= 2


def test_a_broken_disk_ends_requests_but_not_the_engine(served: Any) -> None:
    broken = threading.Event()
    s = served(capacity=4, store={"fails": lambda read: broken.is_set()})
    s.ask(draw(6), 3).end()
    broken.set()
    lost = [s.ask(draw(6, seed), 8) for seed in (1, 2)]
    for each in lost:
        finished = each.end()
        assert finished.reason == "error"
        assert isinstance(finished.error, StoreError)
    assert s.engine.state()[0] == "ready"
    broken.clear()
    assert s.ask(draw(6, 3), 3).end().reason == "length"


def test_a_memory_error_ends_only_its_request(served: Any, monkeypatch: Any) -> None:
    s = served()
    prepare = s.engine.admission.prepare

    def fails(sequence: Any, running: Any) -> None:
        if sequence.request.name == "unlucky":
            raise MemoryError
        prepare(sequence, running)

    monkeypatch.setattr(s.engine.admission, "prepare", fails)
    other, lost = s.ask(draw(6), 9), s.ask(draw(6, 1), 9, name="unlucky")
    finished = lost.end()
    assert finished.reason == "error"
    assert isinstance(finished.error, DeviceError)
    assert other.end().reason == "length"
    assert s.engine.stats()["kv"]["reserved_bytes"] == 0


def test_a_broken_engine_ends_all_requests_with_an_error(served: Any, monkeypatch: Any) -> None:
    s = served(max_batch=1)
    both_asked = threading.Event()

    def bug(shares: object) -> None:
        both_asked.wait(PATIENCE)
        raise RuntimeError("a bug")

    monkeypatch.setattr(s.engine.passes, "run", bug)
    recorders = [s.ask(draw(4, seed), 5) for seed in range(2)]
    both_asked.set()
    for each in recorders:
        finished = each.end()
        assert finished.reason == "error"
        assert "a bug" in str(finished.error)
    name, _, why = s.engine.state()
    assert (name, why) == ("failed", "a bug")
    with pytest.raises(ClosedError, match="the engine has failed: a bug"):
        s.ask(draw(4), 5)


def test_an_engine_whose_model_does_not_load_has_failed() -> None:
    engine = start("/nowhere/at/all", LoadConfig(), ServeConfig())
    engine._thread.join(PATIENCE)
    name, _, why = engine.state()
    assert name == "failed"
    assert "/nowhere/at/all" in why
    with pytest.raises(ClosedError):
        engine.submit(None, None)  # type: ignore[arg-type]
    assert engine.stats()["state"]["name"] == "failed"
    engine.stop(0)
    assert issubclass(NotAModel, Exception)


def test_a_loading_engine_refuses_requests_as_busy() -> None:
    go = threading.Event()

    def load(progress: Any) -> Any:
        progress(0.25, "waiting")
        go.wait(PATIENCE)
        raise NotAModel("there is none")

    engine = ContinuousEngine(load, ServeConfig(), 100)
    until = time.monotonic() + PATIENCE
    while engine.state() != ("loading", 0.25, "waiting") and time.monotonic() < until:
        time.sleep(0.005)
    with pytest.raises(Busy, match="the model is loading"):
        engine.submit(None, None)  # type: ignore[arg-type]
    assert engine.stats()["state"]["progress"] == 0.25
    go.set()
    engine._thread.join(PATIENCE)
    assert engine.state()[0] == "failed"
