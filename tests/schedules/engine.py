"""Scenarios of the serving engine: clients submit, cancel, resize and stop.

The engine, its passes, admission and prefix caches in memory and on disk are real, and so are the
driver and its copier below them. The model is a toy: its next token depends on all tokens before,
and its keys are the ids of tokens, so an answer is right only if its KV cache is.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
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
from greenroom.runtime.store.disk_turns import DiskTurns
from greenroom.server.engine import loop, snapshot
from greenroom.server.engine.loop import ContinuousEngine, LoadedModel
from greenroom.server.engine.prompts.store import PromptStore
from greenroom.server.engine.requests import Busy, Event, Finished, Request, Sampling
from tests.runtime.rig import Ahead, Rig
from tests.schedules.driver import CHUNK_BYTES, EXPERTS, LAYERS, TornSlots, catalog
from tests.schedules.driver import TRACED as DRIVER_FILES
from tests.schedules.primitives import CLOCK, THREADS, point
from tests.schedules.prompts import TOKEN_BYTES, TOKENS, check_files, open_folder
from tests.schedules.prompts import TRACED as PROMPT_FILES
from tests.schedules.runner import Scenario, run_threads

VOCABULARY, CONTEXT = 50, 120
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
        self.prompts: Path | None = None  # the folder of the prompt cache, if there is one
        self.hooks = SimpleNamespace(announce_prompts=lambda count: None)
        sizes = SimpleNamespace(total_bytes=lambda tokens: 8 * tokens,
                                held_bytes=lambda tokens: 8 * tokens)  # fmt: skip
        self.setup = SimpleNamespace(
            context=CONTEXT, prompt_block=512, keys_values=sizes, make_growing=lambda cache: None
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


def _open_prompt_store(model: ToyModel, config: ServeConfig, wake: Any) -> PromptStore | None:
    greenroom = model.greenroom
    if greenroom.prompts is None:
        return None
    turns = DiskTurns(greenroom.driver.scheduler.view)
    return PromptStore(open_folder(greenroom.prompts), turns, TOKENS * TOKEN_BYTES, wake)


@contextmanager
def toy_models() -> Iterator[None]:
    """Context manager within which engines serve toy models."""
    stubs: dict[str, Any] = {
        "Batch": ToyBatch,
        "PictureReader": lambda *_: SimpleNamespace(description=""),
        "Grammars": lambda *_: SimpleNamespace(prepare=lambda: None),
        "weight_matrix": lambda _: np.zeros((VOCABULARY, 1)),
        "end_ids": lambda _: (),
        "open_prompt_store": _open_prompt_store,
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

    def __init__(self, random: Random, prompts: Path | None = None) -> None:
        self.failing = random.choice((0.0, 0.0, 0.1, 0.6))
        self.is_stopping = False
        self.breaks = random.random() < 0.1
        greenroom = ToyGreenroom(random, self.failing)
        config = ServeConfig(
            max_batch=random.choice((1, 2, 3)),
            max_queue=random.choice((1, 8, 8, 8)),
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

        self.greenroom, greenroom.prompts = greenroom, prompts
        self.engine = ContinuousEngine(load, config, CONTEXT)
        # Prompts with a common prefix; only longer ones are stored on disk.
        least, length = (1, 24) if prompts is None else (50, 100)
        base = [7 * n % VOCABULARY for n in range(length)]
        self.requests = [
            Request(
                (*base[: random.randint(least, length)], random.randrange(VOCABULARY)),
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


def _play_with_prompts(random: Random) -> None:
    """An engine with a prompt cache on disk, and another one that finds its files."""
    path = Path(tempfile.mkdtemp(prefix="prompts-"))
    try:
        for _ in range(2):
            _play(random, path)
        check_files(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _play(random: Random, prompts: Path | None = None) -> None:
    clients = Clients(random, prompts)
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
POLLS = ("ContinuousEngine._await", "PromptStore._next")
ENGINE = Scenario("engine", _play, (*TRACED, *DRIVER_FILES), POLLS, 5000)
RESTARTS = Scenario(
    "restarts", _play_with_prompts, (*TRACED, *PROMPT_FILES, *DRIVER_FILES), POLLS, 15_000
)
