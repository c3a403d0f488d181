"""Snapshots of a loaded model's expert cache, for the live page and the live screen.

All that is read is a number, an array that other threads write in place, or a list copied in one
step of the interpreter. So a reader never waits for the computation, and the computation never
waits for it; values of one snapshot may be a moment apart.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from greenroom.core.pieces import Ints
from greenroom.runtime.kernels.dense.stored import dense_bytes
from greenroom.runtime.memory.system import rss_bytes

if TYPE_CHECKING:
    from greenroom.hf.attach.attach import Greenroom

MEMORY_S = 2.0  # between two readings of the process's memory
OUTCOMES = ("prefetches", "useful", "late", "wasted", "dropped", "displaced", "failed")


class MemoryParts(NamedTuple):
    """Memory of a loaded model in bytes, by part; with a GPU of its memory.

    budget: None without a budget; process: None with a GPU; buffers: None where they are unknown
    """

    budget: int | None
    process: int | None
    dense: int
    slots: int
    keys_values: int
    buffers: int | None


class LinkState(NamedTuple):
    """Counters of a link since loading, and its queue: waiting demands, prefetches, moving."""

    nbytes: int
    busy_s: float
    demands: int
    prefetches: int
    moving: int


class PrefetchState(NamedTuple):
    """State of prefetching: the guard's verdict, the predictor's accuracy, and outcomes by name."""

    on: bool
    verdict: str | None
    accuracy: float | None
    outcomes: dict[str, int]


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """State of an expert cache at one time, and its counters since loading.

    present: experts in memory or on their way there
    hits, misses, stalls: by layer; stalls in seconds
    states, uses: of each expert, its `ExpertState` and the number of requests for it
    used: whether an expert was requested since the last snapshot
    """

    capacity: int
    present: int
    memory: MemoryParts
    hits: list[int]
    misses: list[int]
    stalls: list[float]
    links: list[LinkState]
    prefetch: PrefetchState
    states: Ints
    used: NDArray[np.bool_]
    uses: Ints


class SnapshotReader:
    """Reads snapshots of a model's expert cache, one after another."""

    def __init__(self, greenroom: Greenroom, model: Any) -> None:
        self._greenroom = greenroom
        self._dense = dense_bytes(model)
        self._uses: Ints | None = None  # of the last snapshot
        self._process_at = float("-inf")
        self._process: int | None = None  # bytes; None with a GPU

    def forget(self) -> None:
        """Forget the last snapshot: the next one counts no expert as just used."""
        self._uses = None

    def read(self, keys_values: int) -> CacheSnapshot:
        """Read a snapshot; `keys_values` are the bytes of all KV caches."""
        driver = self._greenroom.driver
        view, meter, predictions = driver.scheduler.view, driver.meter, driver.predictions
        uses = driver.request_counts.copy()
        used = uses != self._uses if self._uses is not None else np.zeros(uses.size, np.bool_)
        self._uses = uses
        misses = driver.miss_counts.tolist()
        requests = by_layer(uses, np.asarray(driver.pieces.offsets))
        states, counts, clock = view.expert_states(), view.counted(), time.perf_counter()
        return CacheSnapshot(
            capacity=self._greenroom.capacity,
            present=int(np.count_nonzero(states)),
            memory=self._read_memory(keys_values),
            hits=[count - missed for count, missed in zip(requests, misses, strict=True)],
            misses=misses,
            stalls=list(meter.layer_stalls),
            links=[
                LinkState(link.nbytes, link.busy_until(clock), *lengths)
                for link, lengths in zip(meter.links, view.queue_lengths(), strict=True)
            ],
            prefetch=PrefetchState(
                on=predictions.foresight is not None and predictions.foresight.on,
                verdict=predictions.guard.verdict if predictions.guard is not None else None,
                accuracy=view.accuracy.share(),
                outcomes={name: getattr(counts, name) for name in OUTCOMES},
            ),
            states=states,
            used=used,
            uses=uses,
        )

    def _read_memory(self, keys_values: int) -> MemoryParts:
        """Return the memory by part; that of the process is read anew every few seconds."""
        greenroom, now = self._greenroom, time.monotonic()
        setup, budget = greenroom.setup, greenroom.slot_budget
        if not setup.cuda and now >= self._process_at + MEMORY_S:
            self._process_at, self._process = now, rss_bytes()
        need = budget.first_block_needs() if budget is not None else None
        return MemoryParts(
            setup.budget_bytes,
            self._process,
            self._dense,
            greenroom.capacity * setup.catalog.slot_bytes,
            keys_values,
            need.staging + need.workspace if need is not None else None,
        )


def by_layer(values: Ints, offsets: Ints) -> list[int]:
    """Return sums of experts' values for each layer; `offsets` are the layers' first ids."""
    sums: list[int] = np.add.reduceat(values, offsets[:-1]).tolist()
    return sums
