"""Pinned sets: a task's most used experts, which the cache never evicts (PreMoe, section 3).

A file has one or several tasks. The experts of a single task are pinned from the start. Of several
tasks, the one is chosen whose pattern is nearest, by the cosine of the angle, to the experts that a
request's prompt used: PreMoe's retrieval, with counts in place of gate scores. Pinning an expert
does not fetch it; it stays once it is resident.

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
    """A task's pinned experts, and its pattern of expert use.

    The experts are dense ids, ascending; the pattern is [P].
    """

    experts: Ints
    pattern: Floats


@dataclass(frozen=True)
class Pins:
    """The pinned experts of several tasks, by task name, for one model.

    Layer i's experts begin at `offsets[i]` [L + 1].
    """

    tasks: Mapping[str, Task]
    offsets: tuple[int, ...]

    @property
    def first(self) -> Ints:
        """Return the experts to pin at the start: those of a single task, else none."""
        if len(self.tasks) > 1:
            return np.empty(0, np.int64)
        return next(iter(self.tasks.values())).experts

    def nearest(self, counts: Floats | Ints) -> str:
        """Find the task whose pattern of expert use is nearest to a prompt's.

        The prompt's pattern are its counts of expert uses, [P].

        The first task where all counts are 0.
        """
        norm = np.linalg.norm(counts) or 1.0

        def angle(task: Task) -> float:
            return float(counts @ task.pattern) / float(norm * (np.linalg.norm(task.pattern) or 1))

        return max(self.tasks, key=lambda name: angle(self.tasks[name]))

    def as_json(self) -> dict[str, Any]:
        """Return the pinned experts of all tasks as the content of a JSON file."""
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
        """Read a file of pinned experts, and check that it fits the model.

        UsageError where it does not fit.
        """
        content = read_json(path, FORMAT, "holds no pins", "greenroom trace hot", UsageError)
        if (version := content.value("version", None)) != VERSION:
            raise UsageError(f"{path}: pins of version {show_value(version)}: make them again")
        try:
            raw = content.object("tasks")
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
        raise Malformed("its layers or experts are not those of the model")
    for ids_in_layer, (a, b) in zip(experts, ranges, strict=True):
        if any(e >= b - a for e in ids_in_layer) or len({*ids_in_layer}) < len(ids_in_layer):
            raise Malformed(f"experts of a layer must be different ids below {b - a}")
    ids = [
        a + e for ids_in_layer, (a, _) in zip(experts, ranges, strict=True) for e in ids_in_layer
    ]
    return Task(np.sort(np.array(ids, np.int64)), np.array([x for row in pattern for x in row]))
