"""Pinned sets: experts of a task, which the policy does not evict (PreMoe, section 3).

A file has one or several tasks. One is kept from the start. Of several the one is kept whose
pattern is nearest to what a request's own prompt used, by the cosine of the angle between them:
PreMoe's retrieval, by counts instead of gate scores. A pinned expert is not brought by that; once
it is there, it stays.

    {"format": "greenroom-pins", "version": 1, "model": ...,
     "tasks": {"coding": {"experts": [[3, 8], ...], "pattern": [[0.1, ...], ...]}}}

`experts` are ids within their layer, `pattern` is the share of the task's tokens that used each of
the layer's experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.pieces import Ints
from greenroom.errors import UsageError
from greenroom.json_file import (
    JsonObject,
    Malformed,
    integer,
    list_of,
    number,
    read_json,
    show_value,
)

FORMAT, VERSION = "greenroom-pins", 1
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Task:
    """`experts` are dense ids, ascending; `pattern` [P] has a number for every expert."""

    experts: Ints
    pattern: Floats


@dataclass(frozen=True)
class Pins:
    """Tasks by name, of a model whose layers begin at `offsets` [L + 1]."""

    tasks: Mapping[str, Task]
    offsets: tuple[int, ...]

    @property
    def first(self) -> Ints:
        """What is kept before anything was asked for: the experts of the only task."""
        if len(self.tasks) > 1:
            return np.empty(0, np.int64)
        return next(iter(self.tasks.values())).experts

    def nearest(self, counts: Floats | Ints) -> str:
        """The task that a prompt is of, whose tokens used each expert so often [P]. The first one
        where nothing was used."""
        norm = np.linalg.norm(counts) or 1.0

        def angle(task: Task) -> float:
            return float(counts @ task.pattern) / float(norm * (np.linalg.norm(task.pattern) or 1))

        return max(self.tasks, key=lambda name: angle(self.tasks[name]))

    def as_json(self) -> dict[str, Any]:
        """What the file holds."""
        ranges = list(pairwise(self.offsets))
        return {
            "format": FORMAT,
            "version": VERSION,
            "tasks": {
                name: {
                    "experts": [
                        (task.experts[(task.experts >= a) & (task.experts < b)] - a).tolist()
                        for a, b in ranges
                    ],
                    "pattern": [np.round(task.pattern[a:b], 6).tolist() for a, b in ranges],
                }
                for name, task in self.tasks.items()
            },
        }

    @classmethod
    def load(cls, path: str | Path, offsets: Sequence[int]) -> Pins:
        """Read a file for a model with these layers. UsageError says what is wrong with it."""
        found = read_json(path, FORMAT, "holds no pins", "greenroom trace hot", UsageError)
        if (version := found.value("version", None)) != VERSION:
            raise UsageError(f"{path}: pins of version {show_value(version)}: make them again")
        try:
            raw = found.object("tasks")
            tasks = {name: _task(raw.object(name), offsets) for name in raw}
        except Malformed as error:
            raise UsageError(f"{path} is damaged, or of another model: {error}") from error
        if not tasks:
            raise UsageError(f"{path} has no tasks")
        return cls(tasks, tuple(offsets))


def _task(raw: JsonObject, offsets: Sequence[int]) -> Task:
    ranges = list(pairwise(offsets))
    experts, pattern = (
        raw.list_of("experts", list_of(integer)),
        raw.list_of("pattern", list_of(number)),
    )
    if len(experts) != len(ranges) or [len(p) for p in pattern] != [b - a for a, b in ranges]:
        raise Malformed("it has other layers or experts")
    for own, (a, b) in zip(experts, ranges, strict=True):
        if any(e >= b - a for e in own) or len({*own}) < len(own):
            raise Malformed(f"experts of a layer must be different ones of {b - a}")
    ids = [a + e for own, (a, _) in zip(experts, ranges, strict=True) for e in own]
    return Task(np.sort(np.array(ids, np.int64)), np.array([x for row in pattern for x in row]))
