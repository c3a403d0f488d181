"""Scenario of the prompt cache on disk: its thread reads and writes while requests come and go."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from greenroom.runtime.store.disk_turns import DiskTurns
from greenroom.server.engine.prefixes import Ids, PrefixEntry, as_ids
from greenroom.server.engine.prompts.folder import PromptFolder
from greenroom.server.engine.prompts.store import PromptLoad, PromptStore
from tests.schedules.primitives import THREADS, point
from tests.schedules.runner import Scenario, run_threads

KEY = "0123456789abcdef" * 2
TOKENS = 32  # of a complete segment
TOKEN_BYTES = 8  # of keys and values
REUSED = -1.0  # in memory that has another use now


class View:
    """The part of the scheduler's view that turns at the disk need."""

    def __init__(self) -> None:
        self.demands, self.holds = 0, 0

    def hold_prefetches(self, hold: bool) -> None:
        self.holds += 1 if hold else -1
        assert 0 <= self.holds <= 1


def open_folder(path: Path, limit: int = 1 << 20) -> PromptFolder:
    return PromptFolder(path, limit, KEY, TOKENS, (0,))


def make_cache(ids: Ids) -> Any:
    """Make a KV cache of one layer, whose keys are the ids of its tokens."""
    cache = DynamicCache()
    keys = torch.from_numpy(ids.astype(np.float32)).view(1, 1, -1, 1)
    cache.update(keys.clone(), -keys, 0)
    return cache


def check_files(path: Path) -> None:
    """Check that every segment file has the keys and values of its own tokens."""
    folder, buffer = open_folder(path), np.empty(TOKENS * TOKEN_BYTES, np.uint8)
    for segment in list(folder._segments.values()):
        data = folder.read(segment, buffer, lambda: None)
        assert data is not None
        keys, values = data.view(np.float32).reshape(2, -1)
        assert np.array_equal(keys, segment.ids)
        assert np.array_equal(-values, segment.ids)
    assert not folder.damaged
    assert not list(path.glob(".*")), "a draft is left"


class Engine:
    """The thread of the engine, as the prompt cache sees it."""

    def __init__(self, random: Random, path: Path) -> None:
        self.random, self.view = random, View()
        segment = 1000  # bytes of a file, about
        limit = random.choice((1 << 20, 6 * segment))
        self.changed = THREADS.Condition()
        self.store = PromptStore(
            open_folder(path, limit),
            DiskTurns(self.view),  # type: ignore[arg-type]
            TOKENS * TOKEN_BYTES,
            self._wake,
        )
        self.is_computing = False
        self.store.is_busy = lambda: self.is_computing
        base = as_ids([random.randrange(500) for _ in range(200)])
        self.prompts = [base, base.copy(), as_ids([random.randrange(500) for _ in range(200)])]
        self.prompts[1][random.choice((40, 64, 100)) :] += 1
        self.entries: list[PrefixEntry] = []
        self.dropped: list[Any] = []  # tensors of which the store must be done

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def run(self) -> None:
        for _ in range(self.random.randint(2, 6)):
            self.is_computing = self.random.random() < 0.5
            self.random.choice((self._save, self._save, self._load, self._load, self._limit))()

    def _save(self) -> None:
        ids = self.random.choice(self.prompts)[: self.random.randint(60, 150)]
        entry = PrefixEntry(ids, make_cache(ids), nbytes=ids.size * TOKEN_BYTES)
        self.entries.append(entry)
        self.store.save(entry)
        if self.random.random() < 0.3:
            self.store.drop_save(entry)

    def _limit(self) -> None:
        """Free the memory of all requests that are not written yet, for another use."""
        self.store.limit_pending(0, ())
        for entry in self.entries:
            layer = entry.cache.layers[0]
            layer.keys.fill_(REUSED)
            layer.values.fill_(REUSED)
        self.entries.clear()

    def _load(self) -> None:
        ids = self.random.choice(self.prompts)
        match = self.store.find(ids, 1, 1)
        if not match.tokens:
            return
        tensors = [torch.zeros(1, match.tokens, 1) for _ in range(2)]
        load = self.store.load(match, object(), [*tensors])
        if self.random.random() < 0.3:
            point()
            self.store.cancel_load(load)
            for each in tensors:
                each.fill_(REUSED)
            self.dropped += tensors
            return
        self._await(load)
        count = load.tokens
        expected = torch.from_numpy(ids[:count].astype(np.float32))
        assert torch.equal(tensors[0][0, :count, 0], expected)
        assert torch.equal(tensors[1][0, :count, 0], -expected)
        if self.random.random() < 0.5:
            self.store.cancel_load(load)

    def _await(self, load: PromptLoad) -> None:
        with self.changed:
            while not load.done:
                self.changed.wait()


def _play(random: Random) -> None:
    path = Path(tempfile.mkdtemp(prefix="prompts-"))
    try:
        engine = Engine(random, path)
        store, view = engine.store, engine.view
        grace_s = random.choice((0.0, 1e-3, 10.0))

        def demand() -> None:
            for _ in range(3):
                view.demands = 1 - view.demands
                point()
            view.demands = 0

        def read_stats() -> None:
            for _ in range(2):
                assert store.stats()["damaged"] == 0

        others = [each for each in (demand, read_stats) if random.random() < 0.5]
        run_threads(engine.run, *others)
        store.close(grace_s)
        assert view.holds == 0
        assert all(bool((each == REUSED).all()) for each in engine.dropped)
        if grace_s > 1.0:
            assert not store.stats()["pending"]
        check_files(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


TRACED = tuple(f"greenroom.server.engine.prompts.{name}" for name in ("store", "folder"))
PROMPTS = Scenario(
    "prompts",
    _play,
    (*TRACED, "greenroom.runtime.store.disk_turns"),
    ("PromptStore._next",),
    length=600,
)
