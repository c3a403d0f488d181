"""Read a layout conversion off its result: which strided blocks move where.

A chain of conversions (merge, concatenate, chunk, transpose, interleave) only moves rows and
columns. Run on matrices that hold the elements' own numbers, its result says where each element
came from; this module finds the two-dimensional strided blocks in these numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

MOST = 1 << 10  # blocks; a layout that needs more is not a layout but a permutation


@dataclass(frozen=True, slots=True)
class Block:
    """Elements (i, j) of source tensor `source` and where they go; all figures in elements."""

    source: int
    source_start: int
    target_start: int
    shape: tuple[int, int]
    source_strides: tuple[int, int]
    target_strides: tuple[int, int]


def find_blocks(origin: np.ndarray, sizes: Sequence[int]) -> list[Block] | None:
    """The blocks of a conversion, or None where there is no short description.

    `origin[i, j]` is the number of the source element that lands at target element (i, j); source
    tensors are numbered one after another and have `sizes` elements.
    """
    if not origin.size:
        return None
    ends = np.cumsum(np.asarray(sizes, np.int64))
    rows, columns = _runs(origin[:, 0], ends), _runs(origin[0], ends)
    if len(rows) * len(columns) > MOST:
        return None
    blocks = []
    for down, across in product(rows, columns):
        block = _block(origin, down, across, ends)
        if block is None:
            return None
        blocks.append(block)
    return blocks


def _runs(line: np.ndarray, ends: np.ndarray) -> list[slice]:
    """Cut a row or a column into runs of one tensor whose numbers are evenly spaced: all of it,
    every second element, or one run after another."""
    source = np.searchsorted(ends, line, side="right")

    def run(start: int, step: int) -> slice:
        """The longest run that starts here."""
        values, tensor = line[start::step], source[start::step]
        evenly = values[0] + (values[:2][-1] - values[0]) * np.arange(len(values))
        same = (values == evenly) & (tensor == tensor[0])
        count = len(values) if same.all() else int(same.argmin())
        return slice(start, start + (count - 1) * step + 1, step)

    for step in (1, 2):
        runs = [run(start, step) for start in range(min(step, len(line)))]
        if all(found.stop + step > len(line) for found in runs):
            return runs
    runs, start = [], 0
    while start < len(line) and len(runs) <= MOST:
        runs.append(run(start, 1))
        start = runs[-1].stop
    return runs


def _block(origin: np.ndarray, down: slice, across: slice, ends: np.ndarray) -> Block | None:
    """The block of some rows and columns; None where it is not one."""
    values = origin[down, across]
    (rows, columns), width = values.shape, origin.shape[1]
    first, last = values[0, 0], values[[0, 0, -1, -1], [0, -1, 0, -1]]
    steps = values[:2, 0][-1] - first, values[0, :2][-1] - first
    if any((np.diff(values, axis=axis) != step).any() for axis, step in enumerate(steps)):
        return None
    source, *others = np.searchsorted(ends, last, side="right").tolist()
    if any(other != source for other in others):
        return None
    outer, inner = (int(steps[0]), down.step * width), (int(steps[1]), across.step)
    if columns == 1:
        inner = outer if rows > 1 else (1, 1)
    n = rows * columns
    if rows == 1 or outer == (inner[0] * columns, inner[1] * columns):
        rows, columns, outer = 1, n, (inner[0] * n, inner[1] * n)
    return Block(
        source=source,
        source_start=int(first) - int(ends[source - 1] if source else 0),
        target_start=down.start * width + across.start,
        shape=(rows, columns),
        source_strides=(outer[0], inner[0]),
        target_strides=(outer[1], inner[1]),
    )
