"""An engine over a tiny model whose reads can fail, and a recorder of answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import torch

from greenroom.config import ServeConfig
from greenroom.errors import GreenroomError
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.checkpoint.resolve import open_checkpoint
from greenroom.hf.checkpoint.tokenizer import tokenizer_of
from greenroom.hf.kv.sizes import kv_bytes
from greenroom.hf.memory.budget import MemoryNeeds, Workspace
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.memory.slot_budget import SlotBudget
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.hf.variants.index import Adapters
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


class AnswerRecorder:
    """A listener that records the events of one answer."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.prompt: tuple[Token, ...] | None = None
        self.finished: Finished | None = None
        self.ticket: Sequence | None = None
        self.first = threading.Event()
        self._end = threading.Event()
        self.on_token: Callable[[Token], None] = lambda token: None

    def __call__(self, event: Event) -> None:
        assert self.finished is None, "an event came after the end"
        if isinstance(event, Finished):
            self.finished = event
            self.first.set()
            self._end.set()
        elif isinstance(event, PromptTokens):
            assert self.prompt is None
            assert not self.tokens
            self.prompt = event.tokens
        else:
            self.tokens.append(event)
            self.first.set()
            self.on_token(event)

    def cancel(self) -> None:
        """Cancel the request; its ticket may be set a moment after its first token."""
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


class NotReady(GreenroomError):
    """The engine could not be started; the message says why."""


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
        slots_at_full_context: int | None = None,
        further_budget: int = 0,
        kv: str = "dynamic",
        setup_options: dict[str, Any] | None = None,
        store: dict[str, Any] | None = None,
        adapters: Many[Path] = (),
        **serve: Any,
    ) -> None:
        self.store: Any = None

        def load(progress: Callable[[float, str], None]) -> LoadedModel:
            progress(0.0, "loading")
            variants = Adapters(tuple(map(str, adapters)), as_variants=True)
            mtp = serve.get("speculate") == "mtp"
            skeleton = ModelSkeleton.of(folder, mtp=mtp, adapters=variants)
            sizes = kv_bytes(skeleton.model, kv, block=512, room=context)
            setup = ModelSetup(
                skeleton.catalog,
                capacity=capacity,
                context=context,
                keys_values=sizes,
                variants=skeleton.variants,
                **(setup_options or {}),
            )
            self.store = FakeStore(DiskStore(skeleton.catalog), **(store or {}))
            model: Any = skeleton.load()
            model.greenroom = Greenroom(model, setup, store=self.store)
            if slots_at_full_context is not None:
                slot_budget = SlotBudget(
                    1 << 40, MemoryNeeds(0, 0, 0, 0, 0), skeleton.catalog, sizes,
                    Workspace(0, 0, 0, 0), context=context, block=512, min_slots=1,
                )  # fmt: skip
                slot_budget = slot_budget.for_slots(slots_at_full_context)
                slot_budget.budget += further_budget
                model.greenroom.use_slot_budget(slot_budget)
            return LoadedModel(model, tokenizer_of(open_checkpoint(folder)))

        self.engine = ContinuousEngine(load, ServeConfig(**serve), context, journal)
        until = time.monotonic() + PATIENCE
        while self.engine.state()[0] == "loading" and time.monotonic() < until:
            time.sleep(0.005)
        if self.engine.state()[0] != "ready":
            self.close()
            if self.store is not None:
                self.store.close()
            raise NotReady(self.engine.state()[2])

    def ask(
        self,
        ids: Many[int],
        new: int = 8,
        *,
        recorder: AnswerRecorder | None = None,
        ends: tuple[int, ...] | None = (),
        sampling: Sampling = GREEDY,
        **request: Any,
    ) -> AnswerRecorder:
        recorder = recorder or AnswerRecorder()
        recorder.ticket = self.engine.submit(
            Request(tuple(ids), new, sampling=sampling, end_ids=ends, **request), recorder
        )
        return recorder

    def close(self) -> None:
        self.engine.stop(0.0)


def draw(count: int, seed: int = 0) -> list[int]:
    """Return random token ids."""
    return torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(model: Any, ids: Many[int], new: int) -> list[int]:
    """Return the greedy answer of transformers' `generate`."""
    input_ids = torch.tensor([list(ids)])
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": -1}  # it never ends
    out = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **options)
    return out[0, len(ids) :].tolist()
