"""An exception in one request's own work ends that request, and no other."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from greenroom.errors import ClosedError, DeviceError
from greenroom.server.engine.failures import PASSES_THROUGH, RequestFailed, as_error, contain_errors
from greenroom.server.engine.loop import ContinuousEngine
from greenroom.server.engine.requests import NotFinite, Sampling
from tests.server.rig import PATIENCE, AnswerRecorder, draw, greedy


class Panic(BaseException):
    """An exception like pyo3_runtime.PanicException: not an Exception."""


RAISED = [RuntimeError("odd"), RecursionError("deep"), MemoryError(), ZeroDivisionError(), Panic()]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["sampler", "listener", "prepare", "release"])
def test_an_exception_of_any_type_ends_only_its_request(
    served: Any, model: Any, monkeypatch: Any, error: BaseException, where: str
) -> None:
    s = served()
    unlucky = AnswerRecorder()

    def raises(*args: Any, **kwargs: Any) -> Any:
        raise error

    if where == "listener":
        unlucky.on_token = raises
    elif where == "sampler":
        submitted = s.engine._sequence
        monkeypatch.setattr(
            s.engine, "_sequence",
            lambda request, listener: _with(submitted(request, listener), request.name, raises),
        )  # fmt: skip
    else:
        original = getattr(s.engine.admission, where)
        monkeypatch.setattr(
            s.engine.admission, where,
            lambda sequence, *args, **more: raises() if sequence.request.name == "unlucky"
            else original(sequence, *args, **more),
        )  # fmt: skip
    lost = s.ask(draw(6, 1), 3, recorder=unlucky, name="unlucky")
    other = s.ask(draw(6), 9)
    finished = lost.end()
    if where == "release":
        assert finished.reason == "length"
    else:
        assert finished.reason == "error"
        assert isinstance(finished.error, RequestFailed | DeviceError)
        assert finished.error.__cause__ is error
    assert other.end().reason == "length"
    assert other.ids == greedy(model, draw(6), 9)
    assert s.engine.state()[0] == "ready"


def _with(sequence: Any, name: str, sampler: Any) -> Any:
    if name == "unlucky":
        sequence.sampler = sampler
    return sequence


class Tripping:
    """A batch function that fails if a certain token is in the pass."""

    def __init__(self, engine: ContinuousEngine, token: int, error: BaseException) -> None:
        self._batch_function, self._token, self._error = engine.passes._batch, token, error
        self.calls: list[int] = []

    def __call__(self, ids: Any, caches: Any, *scored: Any) -> Any:
        self.calls.append(len(ids))
        logits = self._batch_function(
            ids, caches, *scored
        )  # keys and values are written before it fails
        if any(self._token in each for each in ids):
            raise self._error
        return logits

    def cache(self) -> Any:
        return self._batch_function.cache()


@pytest.mark.parametrize("error", [RuntimeError("a kernel"), Panic(), AssertionError()],
                         ids=lambda error: type(error).__name__)  # fmt: skip
def test_a_failed_pass_is_repeated_for_each_request(
    served: Any, model: Any, error: BaseException
) -> None:
    s = served(max_batch=3, batch_delay=200)
    bad = draw(6, 2)
    others = [[t for t in draw(7, seed) if t != bad[0]] for seed in (0, 1)]
    s.engine.passes._batch = tripping = Tripping(s.engine, bad[0], error)
    recorders = [s.ask(ids, 6) for ids in (*others, bad)]
    finished = recorders[2].end()
    assert finished.reason == "error"
    assert finished.error is not None
    assert finished.error.__cause__ is error
    for ids, each in zip(others, recorders, strict=False):
        assert each.end().reason == "length"
        assert each.ids == greedy(model, ids, 6)
    assert 3 in tripping.calls  # they were together
    assert s.engine.state()[0] == "ready"
    assert s.engine.stats()["kv"]["reserved_bytes"] == 0


def test_an_engine_whose_every_pass_fails_has_failed(served: Any) -> None:
    s = served()

    s.engine.passes._batch = _Broken()
    recorder = s.ask(draw(6), 4)
    assert recorder.end().reason == "error"
    s.engine._thread.join(PATIENCE)
    name, _, why = s.engine.state()
    assert name == "failed"
    assert "illegal memory access" in repr(s.engine.failure.__cause__)
    assert "RuntimeError" in why
    with pytest.raises(ClosedError):
        s.ask(draw(4), 5)


class _Broken:
    def __call__(self, *args: Any) -> Any:
        raise RuntimeError("an illegal memory access")

    def cache(self) -> Any:
        return None


def test_a_broken_expert_cache_ends_the_engine(served: Any) -> None:
    s = served()
    s.ask(draw(6), 2).end()
    driver = s.engine.greenroom.driver
    with driver.lock:
        driver._actions.mark_broken(ValueError("a bug"))
    assert isinstance(s.ask(draw(6, 1), 4).end().error, ClosedError)
    s.engine._thread.join(PATIENCE)
    assert s.engine.state()[0] == "failed"


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_infinite_logits_end_only_their_request(
    served: Any, model: Any, monkeypatch: Any, odd: float
) -> None:
    s = served()
    answer = s.engine._answer

    def spoiled(sequence: Any, logits: Any) -> None:
        if sequence.request.name == "unlucky":
            logits = torch.full_like(logits, odd)
        answer(sequence, logits)

    monkeypatch.setattr(s.engine, "_answer", spoiled)
    sampled = Sampling(temperature=1.0, seed=1)
    other, lost = s.ask(draw(6), 9), s.ask(draw(6, 1), 3, sampling=sampled, name="unlucky")
    error = lost.end().error
    assert isinstance(error, NotFinite)
    assert str(error).startswith(
        "the largest of the model's logits is " + ("NaN" if odd != odd else f"{odd:+}")
    )
    assert other.end().reason == "length"
    assert other.ids == greedy(model, draw(6), 9)


def test_exceptions_that_end_the_process_pass_through() -> None:
    for kind in PASSES_THROUGH:
        with pytest.raises(kind), contain_errors(lambda error: None):
            raise kind
    with pytest.raises(RequestFailed, match="KeyError"), contain_errors():
        raise KeyError("x")
    assert isinstance(as_error(MemoryError()), DeviceError)


def test_a_failed_request_leaves_no_cache_to_the_collector(served: Any, monkeypatch: Any) -> None:
    """Frames of its traceback hold the KV cache, so nothing may hold the error in a cycle."""
    s = served()
    prepare, caches = s.engine.admission.prepare, list[weakref.ref[Any]]()

    def fail(sequence: Any, running: Any) -> None:
        prepare(sequence, running)
        cache = sequence.cache
        caches.append(weakref.ref(cache))
        raise RuntimeError(f"with {cache}")

    gc.collect()
    gc.disable()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(s.engine.admission, "prepare", fail)
            assert s.ask(draw(6, 1), 3).end().reason == "error"
        s.ask(draw(6), 2).end()  # the engine's loop goes on to other requests
        (cache,) = caches
        assert cache() is None
    finally:
        gc.enable()
