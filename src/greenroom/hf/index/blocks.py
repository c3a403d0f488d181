"""Read a layout conversion off its result: which strided blocks move where.

A chain of conversions (merge, concatenate, chunk, transpose, interleave) only moves elements. Run
on tensors that hold the elements' own numbers, its result says where each element came from; this
module finds the two-dimensional strided blocks in these numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST = 1 << 16  # blocks; a layout that needs more is not a layout but a permutation
Run = tuple[int, int, int, int]  # position, value there, elements, step of the value


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

    `origin[t]` is the number of the source element that lands at target element t (1-D, each at
    most once); source tensors are numbered one after another and have `sizes` elements.
    """
    bases = [0, *np.cumsum(np.asarray(sizes, dtype=np.int64)).tolist()]
    by_target = _stacks(_runs(origin), bases, split_value=True)
    if by_target is not None and len(by_target) <= 2 * len(sizes):
        return [_block(row, bases, by_target=True) for row in by_target]
    # Interleaving looks scattered in the target's order but regular in the source's, or vice versa.
    inverse = np.full(bases[-1], -1, dtype=origin.dtype)
    inverse[origin] = np.arange(len(origin), dtype=origin.dtype)
    by_source = _stacks(_used_runs(inverse), bases, split_value=False)
    best = min((rows for rows in (by_target, by_source) if rows is not None), key=len, default=None)
    if best is None:
        return None
    return [_block(row, bases, by_target=best is by_target) for row in best]


def _runs(values: np.ndarray) -> list[Run] | None:
    """Cut a sequence, greedily from its start, into arithmetic runs; None if there are too many."""
    if not len(values):
        return []
    steps = np.diff(values)
    changes = np.flatnonzero(steps[1:] != steps[:-1]) + 1
    if len(changes) > 4 * MOST:
        return None
    ends = [*changes.tolist(), len(steps)]
    runs: list[Run] = []
    at, i = 0, 0
    while at < len(values):
        while i < len(ends) - 1 and ends[i] <= at:
            i += 1
        last = max(ends[i], at)  # steps[at:last] are equal
        step = int(steps[at]) if at < len(steps) else 0
        runs.append((at, int(values[at]), last - at + 1, step))
        at = last + 1
    return runs


def _used_runs(inverse: np.ndarray) -> list[Run] | None:
    """`_runs` over the source elements that land in this target (others hold -1)."""
    used = np.flatnonzero(inverse >= 0)
    cuts = np.flatnonzero(np.diff(used) > 1) + 1
    if len(cuts) > MOST:
        return None
    runs: list[Run] = []
    for segment in np.split(used, cuts):
        start = int(segment[0])
        part = _runs(inverse[start : start + len(segment)])
        if part is None:
            return None
        runs.extend((start + at, value, n, step) for at, value, n, step in part)
    return runs


def _stacks(
    runs: list[Run] | None, bases: list[int], *, split_value: bool
) -> list[list[int]] | None:
    """Stack runs to rows; where a row consists of two runs (gate and up), each kind by itself."""
    if runs is None:
        return None
    runs = _split(runs, bases, split_value)
    plain = _rows(runs, bases, split_value)
    if plain is not None and len(plain) <= 2 * len(bases):
        return plain
    even, odd = (_rows(runs[half::2], bases, split_value) for half in (0, 1))
    if even is None or odd is None:
        return plain
    both = even + odd
    return both if plain is None or len(both) < len(plain) else plain


def _rows(runs: list[Run], bases: list[int], split_value: bool) -> list[list[int]] | None:
    """Stack equal runs with equal distances: [position, value, rows, columns, dp, dv, step]."""
    rows: list[list[int]] = []
    for at, value, n, step in runs:
        if rows and rows[-1][3] == n and (n == 1 or rows[-1][6] == step):
            row = rows[-1]
            dp = at - (row[0] + (row[2] - 1) * row[4])
            dv = value - (row[1] + (row[2] - 1) * row[5])
            k = 1 if split_value else 0
            same = bisect_right(bases, row[k]) == bisect_right(bases, (at, value)[k])
            if same and (row[2] == 1 or (row[4], row[5]) == (dp, dv)):
                row[2], row[4], row[5] = row[2] + 1, dp, dv
                continue
        rows.append([at, value, 1, n, 0, 0, step])
        if len(rows) > MOST:
            return None
    return rows


def _split(runs: list[Run], bases: list[int], by_value: bool) -> list[Run]:
    """Cut runs where they pass from one source tensor into the next."""
    pieces: list[Run] = []
    for at, value, n, step in runs:
        while n:
            first, stride = (value, step) if by_value else (at, 1)
            s = bisect_right(bases, first) - 1
            if stride > 0:
                k = min(n, -((first - bases[s + 1]) // stride))
            elif stride < 0:
                k = min(n, (first - bases[s]) // -stride + 1)
            else:
                k = n
            pieces.append((at, value, k, step))
            at, value, n = at + k, value + k * step, n - k
    return pieces


def _block(row: list[int], bases: list[int], *, by_target: bool) -> Block:
    at, value, m, n, dp, dv, step = row
    if m == 1:
        dp, dv = n, n * step if step else n
    step = step if n > 1 else 1
    p, v = (dp, 1), (dv, step)
    target, source, t, s = (at, value, p, v) if by_target else (value, at, v, p)
    tensor = bisect_right(bases, source) - 1
    return Block(tensor, source - bases[tensor], target, (m, n), s, t)
