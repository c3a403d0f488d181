"""Frames of a running engine: their values, their size, and what they never wait for."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from greenroom.core.scheduler.view import ExpertState
from greenroom.hf.attach import snapshot
from greenroom.runtime.driver.meter import LinkMeter
from greenroom.server.page import live
from greenroom.server.page.broadcast import BYTES_PER_S, FRAME_S
from greenroom.server.page.live import EngineFrames
from tests.drawing.decode import unpack
from tests.models import cached_tiny
from tests.server.rig import AnswerRecorder, Served, draw


@pytest.fixture(scope="module")
def served() -> Any:
    engine = Served(cached_tiny("qwen3_moe", tokenizer=True), capacity=8, max_batch=1)
    yield engine
    engine.close()


def frames_of(served: Served, controls: bool = False) -> EngineFrames:
    return EngineFrames(served.engine, "tiny", controls)


def test_a_greeting_has_what_stays_the_same(served: Served) -> None:
    greeting, catalog = frames_of(served, controls=True).greeting(), served.engine.greenroom.setup
    assert greeting is not None
    assert greeting["layers"] == list(catalog.catalog.experts_per_layer)
    assert (greeting["format"], greeting["kind"], greeting["title"]) == (1, "live", "tiny")
    assert greeting["controls"]
    assert greeting["links"] == ["disk -> host"]
    assert greeting["devices"] == []  # it has no GPU
    json.dumps(greeting, allow_nan=False)


def test_a_frame_has_the_engine_s_counters(served: Served) -> None:
    source = frames_of(served)
    before = source.frame()
    assert before["requests"] == []
    served.ask(draw(20), 6).end()
    frame, driver = source.frame(), served.engine.greenroom.driver
    stats, experts = served.engine.stats(), driver.pieces.experts
    assert frame["state"] == ["ready", 1.0]
    assert frame["tokens"][1] - before["tokens"][1] == 6
    assert [ttft > 0 for _, ttft in frame["answered"]] == [True]
    layers = stats["experts"]["layers"]
    assert frame["hits"] == [layer["hits"] for layer in layers]
    assert frame["misses"] == [layer["misses"] for layer in layers]
    assert sum(frame["misses"]) > 0
    assert len(frame["stalls"]) == len(layers)
    total = round(1000 * stats["stall_s"])
    assert sum(frame["stalls"]) == pytest.approx(total, abs=len(layers))
    assert frame["links"][0][0] == stats["experts"]["bytes_read"]
    assert frame["memory"][3] == stats["memory"]["resident_bytes"]
    states = unpack(frame["states"], 2, experts)
    resident = np.flatnonzero(np.array(states) == ExpertState.RESIDENT)
    assert driver.scheduler.view.resident(resident).all()
    assert frame["slots"] == [8, sum(state != ExpertState.ABSENT for state in states)]
    used = np.flatnonzero(unpack(frame["used"], 1, experts))
    assert {*used.tolist()} <= {*np.flatnonzero(driver.request_counts).tolist()}
    assert used.size
    json.dumps(frame, allow_nan=False)
    assert not any(unpack(source.frame()["used"], 1, experts))


def test_requests_have_rows_while_they_run_and_wait(served: Served) -> None:
    source, seen = frames_of(served), []
    going = threading.Event()
    recorder = AnswerRecorder()

    def on_token(token: Any) -> None:
        if len(recorder.tokens) == 3:
            going.wait(60)

    recorder.on_token = on_token
    served.ask(draw(12), 9, recorder=recorder, name="req_a")
    other = served.ask(draw(5), 2, name="req_b")
    recorder.first.wait(60)
    while not (seen and seen[-1][0][4] == 3):
        seen.append(source.frame()["requests"])
        time.sleep(0.002)
    going.set()
    (name, phase, prompt, computed, new, most, age), waiting = seen[-1]
    assert (name, phase, prompt, computed, new, most) == ("req_a", "answer", 12, 12, 3, 9)
    assert age >= 0
    assert waiting[:6] == ["req_b", "waiting", 5, 0, 0, 2]
    other.end()
    recorder.end()


def test_frames_wait_for_no_lock(served: Served) -> None:
    source, driver = frames_of(served), served.engine.greenroom.driver
    made: list[Any] = []
    with driver.step_lock, driver.lock:
        thread = threading.Thread(target=lambda: made.append(source.frame()))
        thread.start()
        thread.join(20)
    assert made, "a frame waits for a lock of the driver"


def test_experts_in_flight_and_read_ahead_have_states_of_their_own(served: Served) -> None:
    """The scheduler's own view, in a state that is made by hand."""
    served.ask(draw(4), 2).end()
    view = served.engine.greenroom.driver.scheduler.view
    resident = int(np.flatnonzero(view.expert_states() == ExpertState.RESIDENT)[0])
    absent = np.flatnonzero(view.expert_states() == ExpertState.ABSENT)[:3].tolist()
    buffer, entries = view._placement.buffer, view._transfers.queue.entries
    try:
        buffer.begin_prefetch(absent[0], 0, 0, 0.5)
        buffer.complete(absent[0])
        buffer.begin_prefetch(absent[1], 0, 0, 0.5)
        entries[absent[1]] = entries[len(view.pieces) + 5] = SimpleNamespace()
        buffer.occupy(absent[2], 0)
        states = view.expert_states()
        assert states[[*absent, resident]].tolist() == [2, 1, 3, 3]
    finally:
        entries.clear()
        for expert in absent:
            buffer.release(expert)


class BusyEngine:
    """Counters of an engine with many layers, in which everything has large values."""

    def __init__(self, layers: int, experts: int) -> None:
        offsets = tuple(range(0, layers * experts + 1, experts))
        random = np.random.default_rng(0)
        count = layers * experts
        requests = [SimpleNamespace(
            request=SimpleNamespace(name="req_0123456789abcdef", max_new_tokens=99999),
            admitted=1.0, answered=1.0, arrived=0.5, prompt=99999, computed=99999, new=99999,
        ) for _ in range(72)]  # fmt: skip
        view = SimpleNamespace(
            expert_states=lambda: random.integers(0, 4, count),
            queue_lengths=lambda: [(99, 99, 9)] * 2,
            counted=lambda: SimpleNamespace(**dict.fromkeys(snapshot.OUTCOMES, 10**7)),
            accuracy=SimpleNamespace(share=lambda: 0.123456),
        )
        link = LinkMeter(nbytes=10**13, busy_s=98765.4321)
        guard = SimpleNamespace(verdict="prefetching off: tokens took 15 % longer with it " * 2)
        driver = SimpleNamespace(
            pieces=SimpleNamespace(offsets=offsets),
            request_counts=random.integers(10**5, 10**7, count),
            miss_counts=np.full(layers, 10**7),
            meter=SimpleNamespace(layer_stalls=[12345.678] * layers, links=[link] * 2),
            predictions=SimpleNamespace(foresight=SimpleNamespace(on=True), guard=guard),
            scheduler=SimpleNamespace(view=view),
        )  # fmt: skip
        need = SimpleNamespace(staging=10**9, workspace=10**9)
        self.greenroom = SimpleNamespace(
            driver=driver, capacity=count, slot_budget=SimpleNamespace(
                first_block_needs=lambda: need), devices=[], setup=SimpleNamespace(
                cuda=False, budget_bytes=10**11, catalog=SimpleNamespace(slot_bytes=10**7)),
        )  # fmt: skip
        self.admission = SimpleNamespace(reserved=10**9, prefixes=SimpleNamespace(nbytes=10**9))
        self.model, self.was_ready = SimpleNamespace(), True
        self.config = SimpleNamespace(max_batch=8, max_queue=64)
        self.totals = SimpleNamespace(prompt_tokens=10**9, new_tokens=10**9, recent=[])
        self.sequences = lambda: (requests[:8], requests[8:])
        self.state = lambda: ("ready", 1.0, "")


@pytest.mark.parametrize(("layers", "experts"), [(48, 128), (61, 256), (61, 384), (94, 512)])
def test_frames_are_bounded(layers: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two frames a second of 48 x 128 experts stay below 20 kB a second; larger ones come later."""
    monkeypatch.setattr(snapshot, "dense_bytes", lambda model: 10**9)
    source: Any = EngineFrames(BusyEngine(layers, experts), "large", False)  # type: ignore[arg-type]
    sizes = [len(json.dumps(source.frame(), separators=(",", ":"))) for _ in range(6)]
    rate = max(sizes) / max(FRAME_S, max(sizes) / BYTES_PER_S)
    assert rate < 20_000
    assert (max(sizes) <= 10_000) == (layers * experts <= 48 * 128)
    assert max(sizes) < 16_000 + layers * experts // 2


def test_the_memory_of_a_gpu_has_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "dense_bytes", lambda model: 10**9)
    engine: Any = BusyEngine(2, 4)
    assert EngineFrames(engine, "large", False).frame()["memory"][1] > 0
    engine.greenroom.setup.cuda = True
    memory = EngineFrames(engine, "large", False).frame()["memory"]
    assert memory == [10**11, None, 10**9, 8 * 10**7, 2 * 10**9, 2 * 10**9]


def test_nothing_of_a_long_time_without_pages_is_new(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, experts = frames_of(served), served.engine.greenroom.driver.pieces.experts
    source.frame()
    served.ask(draw(4), 2).end()
    monkeypatch.setattr(live, "STALE_S", -1.0)
    frame = source.frame()
    assert frame["answered"] == []
    assert not any(unpack(frame["used"], 1, experts))
