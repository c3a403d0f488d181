"""Speed of reading experts from a checkpoint, beside that of one contiguous range each."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from greenroom.core.layout import Catalog, Extent
from greenroom.runtime.measure.bandwidth import drop_page_cache, run_threads
from greenroom.runtime.store.disk import BLOCK, Chunk, DiskStore, Staging, cut

ROUND_BYTES = 16 << 20  # of each of the two ways in a round
LEAST_ROUNDS = 5


class ExpertReads(NamedTuple):
    """Speeds of reading experts from a disk, in bytes a second.

    ranges:     the most ranges of a file that an expert has
    as_stored:  reading experts as they lie in the checkpoint's files
    contiguous: reading one aligned range of the same size for each expert
    gain:       median over rounds of contiguous / as_stored, minus 1
    steady:     contiguous reads were faster in at least three of four rounds
    nbytes:     bytes of all weight files of the model
    """

    ranges: int
    as_stored: float
    contiguous: float
    gain: float
    steady: bool
    nbytes: int


def measure_expert_reads(
    catalog: Catalog, files: Sequence[str], threads: int, seconds: float
) -> ExpertReads | None:
    """Measure reads of experts as they lie, and of one range for each expert.

    The two ways take turns in rounds of 16 MiB, each of other experts, for about `seconds` seconds.
    Reads are those of a run: direct, in chunks of at most 4 MiB, by `threads` threads.
    Returns None if all experts are one range each, or are too few to measure. Raises
    CheckpointError or StoreError if a file cannot be read.
    """
    ranges = max(len(catalog.extents(first)) for first in catalog.offsets[:-1])
    if ranges == 1:
        return None
    drop_page_cache([Path(path) for path in catalog.files])
    with closing(DiskStore(catalog)) as store:
        pairs: list[tuple[float, float]] = []
        end = time.perf_counter() + seconds
        for experts, others in _rounds(catalog):
            if len(pairs) >= LEAST_ROUNDS and time.perf_counter() > end:
                break
            stored = [chunk for expert in experts for chunk in store.chunks(expert)]
            moved = [chunk for expert in others for chunk in _contiguous(store, expert)]
            if len(pairs) % 2:  # the second of two ways may be faster
                after = _rate(store, moved, threads)
                pairs.append((_rate(store, stored, threads), after))
            else:
                pairs.append((_rate(store, stored, threads), _rate(store, moved, threads)))
    if len(pairs) < LEAST_ROUNDS:
        return None
    as_stored, contiguous = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratios = [after / before for before, after in pairs]
    steady = sum(ratio > 1 for ratio in ratios) >= 0.75 * len(ratios)
    nbytes = sum(Path(path).stat().st_size for path in files)
    gain = statistics.median(ratios) - 1
    return ExpertReads(ranges, as_stored, contiguous, gain, steady, nbytes)


def _rounds(catalog: Catalog) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the experts of each round, for both ways; no expert occurs twice."""
    order = list(range(catalog.experts))
    random.Random(0).shuffle(order)
    count = max(1, ROUND_BYTES // catalog.slot_bytes)
    for begin in range(0, len(order) - 2 * count + 1, 2 * count):
        yield order[begin : begin + count], order[begin + count : begin + 2 * count]


def _contiguous(store: DiskStore, expert: int) -> list[Chunk]:
    """Return the reads of one range as large as an expert, near the expert's own place."""
    extents = store.catalog.extents(expert)
    first = extents[0]
    size = Path(store.catalog.files[first.file]).stat().st_size
    length = min(size, sum(extent.length for extent in extents))
    offset = min(first.offset, size - length) // BLOCK * BLOCK
    return cut(Extent(first.file, offset, length, ()), store.chunk_bytes)


def _rate(store: DiskStore, chunks: Sequence[Chunk], threads: int) -> float:
    """Read chunks by several threads; return the bytes a second."""

    def read(mine: Sequence[Chunk]) -> None:
        staging = Staging()
        for chunk in mine:
            store.read(chunk, staging)

    elapsed = run_threads([lambda i=i: read(chunks[i::threads]) for i in range(threads)])  # type: ignore[misc]
    return sum(chunk.length for chunk in chunks) / elapsed
