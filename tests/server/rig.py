"""An engine over a tiny model, whose reads can be slow or fail, and somebody who listens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from greenroom.config import ServeConfig
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.kv.sizes import kv_bytes
from greenroom.hf.memory.budget import MemoryNeeds, Workspace
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.memory.slot_budget import SlotBudget
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.fakes import FakeStore
from greenroom.runtime.store.disk import DiskStore
from greenroom.server.engine.journal import Journal
from greenroom.server.engine.loop import ContinuousEngine, LoadedModel
from greenroom.server.engine.requests import (
    Event,
    Finished,
    PromptTokens,
    Request,
    Sampling,
    Token,
)
from greenroom.server.engine.sequence import Sequence

PATIENCE = 100.0  # seconds
GREEDY = Sampling(temperature=0.0)


class Heard:
    """What a listener was told."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.prompt: tuple[Token, ...] | None = None
        self.finished: Finished | None = None
        self.ticket: Sequence | None = None
        self.first = threading.Event()
        self._end = threading.Event()
        self.on_token: Callable[[Token], None] = lambda token: None

    def __call__(self, told: Event) -> None:
        assert self.finished is None, "told of something after the end"
        if isinstance(told, Finished):
            self.finished = told
            self.first.set()
            self._end.set()
        elif isinstance(told, PromptTokens):
            assert self.prompt is None
            assert not self.tokens
            self.prompt = told.tokens
        else:
            self.tokens.append(told)
            self.first.set()
            self.on_token(told)

    def cancel(self) -> None:
        """Give it up; its ticket may be known a moment after its first token."""
        until = time.monotonic() + PATIENCE
        while self.ticket is None and time.monotonic() < until:
            time.sleep(0.001)
        assert self.ticket is not None
        self.ticket.cancel()

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    def end(self) -> Finished:
        assert self._end.wait(PATIENCE), "the engine hangs"
        assert self.finished is not None
        return self.finished


class Served:
    """An engine that is ready; `store` is what its experts are read through. With `leaving` slots
    make room for keys and values, and so many are left beside a full context."""

    def __init__(
        self,
        folder: Path,
        *,
        capacity: int = 8,
        context: int = 300,
        journal: Journal | None = None,
        leaving: int | None = None,
        parts: dict[str, Any] | None = None,
        store: dict[str, Any] | None = None,
        **serve: Any,
    ) -> None:
        self.store: Any = None

        def load(progress: Callable[[float, str], None]) -> LoadedModel:
            progress(0.0, "loading")
            skeleton = ModelSkeleton.of(folder)
            sizes = kv_bytes(skeleton.model, block=512, room=context)
            made = ModelSetup(
                skeleton.catalog,
                capacity=capacity,
                context=context,
                keys_values=sizes,
                **(parts or {}),
            )
            self.store = FakeStore(DiskStore(skeleton.catalog), **(store or {}))
            model: Any = skeleton.load()
            model.greenroom = Greenroom(model, made, store=self.store)
            if leaving is not None:
                slot_budget = SlotBudget(
                    1 << 40, MemoryNeeds(0, 0, 0, 0, 0), skeleton.catalog, sizes,
                    Workspace(0, 0, 0, 0), context=context, min_slots=1,
                )  # fmt: skip
                model.greenroom.use_slot_budget(slot_budget.for_slots(leaving))
            return LoadedModel(model, AutoTokenizer.from_pretrained(folder))

        self.engine = ContinuousEngine(load, ServeConfig(**serve), context, journal)
        until = time.monotonic() + PATIENCE
        while self.engine.state()[0] == "loading" and time.monotonic() < until:
            time.sleep(0.005)
        assert self.engine.state()[0] == "ready", self.engine.state()

    def ask(
        self,
        ids: Many[int],
        new: int = 8,
        *,
        heard: Heard | None = None,
        ends: tuple[int, ...] | None = (),
        sampling: Sampling = GREEDY,
        **request: Any,
    ) -> Heard:
        heard = heard or Heard()
        heard.ticket = self.engine.submit(
            Request(tuple(ids), new, sampling=sampling, end_ids=ends, **request), heard
        )
        return heard

    def close(self) -> None:
        self.engine.stop(0.0)


def draw(count: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    return torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(model: Any, ids: Many[int], new: int) -> list[int]:
    """What transformers' own `generate` answers."""
    given = torch.tensor([list(ids)])
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": -1}  # it never ends
    out = model.generate(given, attention_mask=torch.ones_like(given), **options)
    return out[0, len(ids) :].tolist()
