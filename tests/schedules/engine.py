"""Scenarios of the serving engine: clients submit, cancel, resize and stop.

The engine, its passes, admission and prefix cache are real, and so are the driver and its copier
below them. The model is a toy, whose next token depends on all tokens before, and whose keys are
the ids of tokens: an answer is right only if its KV cache is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from greenroom.config import ServeConfig
from greenroom.core.events import Idle
from greenroom.errors import ClosedError, StoreError
from greenroom.server.engine import loop, snapshot
from greenroom.server.engine.loop import ContinuousEngine, LoadedModel
from greenroom.server.engine.requests import Busy, Event, Finished, Request, Sampling
from tests.runtime.rig import Ahead, Rig
from tests.schedules.driver import CHUNK_BYTES, EXPERTS, LAYERS, TornSlots, catalog
from tests.schedules.driver import TRACED as DRIVER_FILES
from tests.schedules.primitives import CLOCK, THREADS, point
from tests.schedules.runner import Scenario, run_threads

VOCABULARY, CONTEXT = 50, 60
GREEDY = Sampling(temperature=0.0)
PATIENT_S = 1e6  # a grace that no schedule uses up


def next_token(ids: Sequence[int]) -> int:
    """Return the toy model's token after others."""
    return (7 * sum(ids) + 3 * len(ids) + ids[-1]) % VOCABULARY


def complete(ids: Iterable[int], count: int) -> list[int]:
    """Return the answer of `count` tokens to a prompt."""
    sequence = [*ids]
    for _ in range(count):
        sequence.append(next_token(sequence))
    return sequence[-count:] if count else []


class ToyGreenroom:
    """What the engine needs of `model.greenroom`, over a driver with real reads."""

    variants = slot_budget = None

    def __init__(self, random: Random, failing: float) -> None:
        broken = [random.random() < failing for _ in range(97)]
        guesses = [random.sample(range(EXPERTS), 2) for _ in range(LAYERS + 1)]
        self.rig = Rig(
            catalog(),
            random.randint(2, LAYERS * EXPERTS - 1),
            random.choice((1, 2)),
            CHUNK_BYTES,
            ahead=random.choice((0, 2)),
            predictor=Ahead(lambda layer: guesses[min(layer, LAYERS)]),
            worker=random.random() < 0.3,
            slots=TornSlots,
            fails=lambda read: broken[read % 97],
        )
        self.driver, self.on_growth = self.rig.driver, lambda: None
        self.hooks = SimpleNamespace(announce_prompts=lambda count: None)
        sizes = SimpleNamespace(total_bytes=lambda tokens: 8 * tokens,
                                held_bytes=lambda tokens: 8 * tokens)  # fmt: skip
        self.setup = SimpleNamespace(
            context=CONTEXT, keys_values=sizes, make_growing=lambda cache: None
        )

    def resize(self, cache: str | int) -> int:
        self.driver.resize(int(cache))
        return self.driver.scheduler.capacity

    def reconfigure(self, idle: bool) -> None: ...

    def prefetch_idle(self) -> None:
        if self.driver.scheduler.view.free_slots:
            self.driver.send(Idle(np.arange(LAYERS * EXPERTS)))

    def close(self) -> None:
        self.driver.close()


class ToyBatch:
    """Forward passes of the toy model: each layer's experts are fetched, keys are added."""

    sequential_reason, has_dynamic_cache, device = "", True, torch.device("cpu")

    def __init__(self, model: Any, exact: bool = False) -> None:
        self._rig = model.greenroom.rig

    def cache(self) -> Any:
        cache = DynamicCache()
        cache.layers.append(DynamicLayer())
        return cache

    def can_batch(self, lengths: Sequence[int]) -> bool:
        return True

    def __call__(
        self, ids: Sequence[Sequence[int]], caches: list[Any], scored: Any = None,
        options: Any = None,
    ) -> list[Tensor]:  # fmt: skip
        rig = self._rig
        rig.begin(max(map(len, ids)) > 1, sum(map(len, ids)))
        try:
            for layer in range(LAYERS):
                experts = sorted({(token + layer) % EXPERTS for each in ids for token in each})
                rig.step(layer, *experts[:3])
                if layer == 0:  # a pass that fails later leaves keys and values
                    for new, cache in zip(ids, caches, strict=True):
                        keys = torch.tensor(new, dtype=torch.float32).view(1, 1, -1, 1)
                        cache.update(keys, -keys, 0)
        finally:
            rig.driver.end_pass()
        logits = torch.zeros(len(ids), VOCABULARY)
        for row, cache in zip(logits, caches, strict=True):
            row[next_token(cache.layers[0].keys.flatten().int().tolist())] = 1.0
        return list(logits)


class ToyModel:
    """What the engine needs of a model."""

    config = SimpleNamespace(is_encoder_decoder=False, model_type="toy")
    generation_config = SimpleNamespace()
    dtype = torch.float32

    def __init__(self, greenroom: ToyGreenroom) -> None:
        self.greenroom = greenroom

    def get_output_embeddings(self) -> Any: ...


@contextmanager
def toy_models() -> Iterator[None]:
    """Context manager within which engines serve toy models."""
    stubs: dict[str, Any] = {
        "Batch": ToyBatch,
        "PictureReader": lambda *_: SimpleNamespace(description=""),
        "Grammars": lambda *_: SimpleNamespace(prepare=lambda: None),
        "weight_matrix": lambda _: np.zeros((VOCABULARY, 1)),
        "end_ids": lambda _: (),
        "open_prompt_store": lambda *_: None,
        "model_stats": lambda _: {},
    }
    snapshots = mock.patch.object(snapshot, "model_stats", stubs["model_stats"])
    with mock.patch.multiple(loop, **stubs), snapshots:
        yield


class Answer:
    """A listener that checks the order of an answer's events."""

    def __init__(self, request: Request) -> None:
        self.request, self.ids = request, list[int]()
        self.finished: Finished | None = None
        self.first, self.end = THREADS.Event(), THREADS.Event()

    def __call__(self, event: Event) -> None:
        assert self.finished is None, "an event came after the end"
        if isinstance(event, Finished):
            self.finished = event
            self.end.set()
        else:
            self.ids.append(event.id)
        self.first.set()

    def check(self, allowed: set[str]) -> None:
        """Check that a complete answer is right, and another one so far."""
        assert self.finished is not None
        count = self.request.max_new_tokens
        expected, reason = complete(self.request.ids, count), self.finished.reason
        if reason == "length":
            assert self.ids == expected
        else:
            assert reason in allowed, (reason, self.finished.error)
            assert self.ids == expected[: len(self.ids)]
        if reason == "error":
            assert isinstance(self.finished.error, StoreError | ClosedError)


class Clients:
    """An engine, and the threads that use it."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.failing = random.choice((0.0, 0.0, 0.1, 0.6))
        self.is_stopping = False
        self.breaks = random.random() < 0.1
        greenroom = ToyGreenroom(random, self.failing)
        config = ServeConfig(
            max_batch=random.choice((1, 2, 3)),
            max_queue=random.choice((1, 8)),
            prefill_chunk=8,
            batch_delay=random.choice((0.0, 0.0, 5.0)),
            no_prefix_reuse=random.random() < 0.3,
            no_idle_prefetch=random.random() < 0.5,
        )

        def load(progress: Any) -> LoadedModel:
            progress(0.5, "loading")
            if self.breaks:
                raise StoreError("the model cannot be loaded")
            return LoadedModel(ToyModel(greenroom), None)

        self.greenroom = greenroom
        self.engine = ContinuousEngine(load, config, CONTEXT)
        base = [random.randrange(VOCABULARY) for _ in range(24)]
        self.requests = [
            Request(
                (*base[: random.randint(1, 24)], random.randrange(VOCABULARY)),
                random.randint(0, 4),
                GREEDY,
                (),
                timeout_s=random.choice((None, None, None, 0.5)),
            )
            for _ in range(5)
        ]
        self.cancels = [random.choice(("", "", "first", "at once")) for _ in self.requests]

    def ask(self, number: int) -> None:
        """Send a request, cancel it or not, and check its answer."""
        answer, how = Answer(self.requests[number]), self.cancels[number]
        allowed = {"timeout"} if answer.request.timeout_s is not None else set()
        allowed |= {"cancelled"} if how else set()
        allowed |= {"error"} if self.failing else set()
        try:
            ticket = self.engine.submit(answer.request, answer)
        except Busy:
            return
        except ClosedError:
            assert self.is_stopping or self.breaks
            return
        if how == "first":
            answer.first.wait()
        if how:
            ticket.cancel()
        answer.end.wait()
        answer.check(allowed | ({"stopping"} if self.is_stopping else set()))

    def await_ready(self) -> None:
        while self.engine.state()[0] == "loading":
            CLOCK.sleep(0.01)


def _play(random: Random) -> None:
    clients = Clients(random)
    engine, greenroom = clients.engine, clients.greenroom
    sizes = [random.randint(1, LAYERS * EXPERTS) for _ in range(random.randint(0, 2))]
    grace_s = random.choice((0.0, 0.0, 0.05, PATIENT_S))

    def ask_first() -> None:
        for number in (0, 1, 2):
            clients.ask(number)

    def ask_second() -> None:
        for number in (3, 4):
            clients.ask(number)

    def resize() -> None:
        for size in sizes:
            try:
                assert engine.resize(size) >= 1
            except Busy:  # the model is loading
                pass
            except ClosedError:
                assert clients.is_stopping or clients.breaks
            engine.stats()

    def stop() -> None:
        point()
        clients.is_stopping = True
        engine.stop(grace_s)

    if random.random() < 0.8:
        clients.await_ready()
    run_threads(ask_first, ask_second, resize, *([stop] if random.random() < 0.5 else []))
    clients.is_stopping = True
    engine.stop(random.choice((0.0, PATIENT_S)))
    assert not engine._thread.is_alive()
    running, waiting = engine.sequences()
    assert not running
    assert not waiting
    if not clients.breaks:
        assert engine.admission.reserved == 0
        assert engine.failure is None
    greenroom.close()  # nothing, unless the model was never loaded


TRACED = tuple(f"greenroom.server.engine.{name}" for name in ("loop", "passes", "admission"))
ENGINE = Scenario("engine", _play, (*TRACED, *DRIVER_FILES), ("ContinuousEngine._await",))
