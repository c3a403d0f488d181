"""Read a layout conversion off its result: which strided blocks move where.

A chain of conversions (merge, concatenate, chunk, transpose, interleave) only moves elements. Run
on tensors that hold the elements' own numbers, its result says where each element came from; this
module finds the two-dimensional strided blocks in these numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

MOST = 1 << 16  # blocks; a layout that needs more is not a layout but a permutation
Run = tuple[int, int, int, int]  # position, value there, elements, step of the value
Line = tuple[int, int, int, int, int]  # target, source, elements, steps of target and source


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
    found = _runs(origin)
    by_target = found and _stacks(((t, s, n, 1, step) for t, s, n, step in found), bases)
    if by_target and len(by_target) <= 2 * len(sizes):
        return by_target
    # Interleaving looks scattered in the target's order but regular in the source's.
    inverse = np.full(bases[-1], -1, dtype=origin.dtype)
    inverse[origin] = np.arange(len(origin), dtype=origin.dtype)
    found = _used_runs(inverse)
    by_source = found and _stacks(((t, s, n, step, 1) for s, t, n, step in found), bases)
    return min((blocks for blocks in (by_target, by_source) if blocks), key=len, default=None)


def _runs(values: np.ndarray) -> list[Run] | None:
    """Cut a sequence, greedily from its start, into arithmetic runs; None if there are too many."""
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
        step = int(steps[at]) if last > at else 1
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


def _stacks(lines: Iterable[Line], bases: list[int]) -> list[Block] | None:
    """Stack the lines of each source tensor that are alike and at equal distances. Where a row of
    the other side consists of two lines (gate and up), each kind is stacked by itself."""
    split = list(_split(lines, bases))
    made = [_stacked(split, kinds) for kinds in (1, 2)]
    return min((blocks for blocks in made if blocks), key=len, default=None)


def _stacked(lines: list[tuple[int, ...]], kinds: int) -> list[Block] | None:
    stacks: defaultdict[tuple[int, int], list[list[int]]] = defaultdict(list)
    for number, (tensor, target, source, n, *steps) in enumerate(lines):
        stack = stacks[tensor, number % kinds]
        if stack and stack[-1][3:6] == [n, *steps]:
            row = stack[-1]
            before = row[2] - 1
            apart = [target - row[0] - before * row[6], source - row[1] - before * row[7]]
            if not before or row[6:] == apart:
                row[2:] = [row[2] + 1, n, *steps, *apart]
                continue
        stack.append([target, source, 1, n, *steps, n, n * steps[1]])
        if len(stack) > MOST:
            return None
    return [
        Block(tensor, source, target, (rows, n), (outer_source, ds), (outer_target, dt))
        for (tensor, _), stack in stacks.items()
        for target, source, rows, n, dt, ds, outer_target, outer_source in stack
    ]


def _split(lines: Iterable[Line], bases: list[int]) -> Iterator[tuple[int, ...]]:
    """Cut lines where they pass from one source tensor into the next: (tensor, line in it)."""
    for target, source, n, dt, ds in lines:
        while n:
            tensor = bisect_right(bases, source) - 1
            room = bases[tensor + 1] - 1 - source if ds > 0 else source - bases[tensor]
            k = min(n, room // abs(ds) + 1)
            steps = (dt, ds) if k > 1 else (1, 1)
            yield tensor, target, source - bases[tensor], k, *steps
            target, source, n = target + k * dt, source + k * ds, n - k
