"""Views of the live screen with counters that are made by hand or at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from greenroom.cli.screen.frame import ANSWER, Frame, ModelFacts, RequestState
from greenroom.cli.screen.layout import View
from greenroom.cli.screen.lines import Line
from greenroom.hf.attach.snapshot import (
    OUTCOMES,
    CacheSnapshot,
    LinkState,
    MemoryParts,
    PrefetchState,
)

GIB = 1 << 30


def snapshot(sizes: Sequence[int], **changes: Any) -> CacheSnapshot:
    """A cache without requests, in which no expert is in memory."""
    experts, layers = sum(sizes), len(sizes)
    return replace(
        CacheSnapshot(
            capacity=2, present=0, memory=MemoryParts(4 * GIB, 2 * GIB, GIB, GIB // 2, 0, 0),
            hits=[0] * layers, misses=[0] * layers, stalls=[0.0] * layers,
            links=[LinkState(0, 0.0, 0, 0, 0)],
            prefetch=PrefetchState(True, None, None, dict.fromkeys(OUTCOMES, 0)),
            states=np.zeros(experts, np.int64), used=np.zeros(experts, np.bool_),
            uses=np.zeros(experts, np.int64),
        ),
        **changes,
    )  # fmt: skip


def frame(sizes: Sequence[int], at: float = 0.0, tokens: int = 0, **changes: Any) -> Frame:
    request = RequestState(ANSWER, 6, tokens, 100, at)
    return Frame(at, tokens, (0.25,) if tokens else (), (request,), snapshot(sizes, **changes))


def facts(sizes: Sequence[int], predictor: str | None = "next-gate") -> ModelFacts:
    return ModelFacts("tiny", tuple(sizes), "lru", predictor, ("disk -> host",))


def random_view(sizes: Sequence[int], frames: int, seed: int = 0) -> View:
    """A view of frames whose counters grow at random."""
    random, experts = np.random.default_rng(seed), sum(sizes)
    view, layers = View(facts(sizes)), len(sizes)
    hits, misses = np.zeros(layers, np.int64), np.zeros(layers, np.int64)
    uses, nbytes, busy = np.zeros(experts, np.int64), 0, 0.0
    popularity = random.dirichlet(np.full(experts, 0.3)) * experts
    for number in range(frames):
        now = random.poisson(0.1 * popularity)
        uses += now
        misses += random.integers(0, 20, layers)
        hits += random.integers(0, 60, layers)
        nbytes, busy = nbytes + int(random.integers(1 << 28)), busy + random.uniform(0, 0.25)
        resident = popularity > np.median(popularity)
        states = np.where(resident, 3, 0)
        states[random.integers(0, experts, 3)] = 1
        states[random.integers(0, experts, 3)] = 2
        view.history.add(frame(
            sizes, at=0.25 * number, tokens=number * 3, hits=hits.tolist(),
            misses=misses.tolist(), stalls=(misses * 0.004).tolist(), states=states,
            used=now > 0, uses=uses.copy(), capacity=int(resident.sum()),
            present=int((states > 0).sum()),
            links=[LinkState(nbytes, busy, number % 3, number % 5, 2)],
            prefetch=PrefetchState(
                True, "prefetching stays on: tokens took 12 % less time with it", 0.71,
                dict.fromkeys(OUTCOMES, 0) | {"prefetches": 900 * number, "useful": 300 * number},
            ),
        ))  # fmt: skip
    return view


def texts(lines: Sequence[Line]) -> list[str]:
    """The texts of lines, without spaces at their ends."""
    return ["".join(segment.text for segment in line).rstrip() for line in lines]
