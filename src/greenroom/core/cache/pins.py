"""Pinned sets: a task's most needed experts, which the cache never evicts (PreMoe, section 3).

A file has one or several tasks. With a single task, its experts are pinned from the start. With
several tasks, each request's prompt selects one: the task whose pattern has the smallest angle to
the prompt's counts of expert uses. This is PreMoe's retrieval, with counts in place of gate scores.
Pinning an expert does not fetch it; the expert stays once it is resident.

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

    experts: dense ids (layer offset + expert number), ascending
    pattern: the share of the task's tokens that used each expert, [experts of the model]
    """

    experts: Ints
    pattern: Floats


@dataclass(frozen=True)
class Pins:
    """The pinned experts of several tasks, by task name, for one model.

    offsets: the dense id of each layer's first expert, and the number of all experts, [layers + 1]
    """

    tasks: Mapping[str, Task]
    offsets: tuple[int, ...]

    @property
    def first(self) -> Ints:
        """Return the experts to pin at the start: those of a single task.

        With several tasks the result is empty, since each prompt selects its task.
        """
        if len(self.tasks) > 1:
            return np.empty(0, np.int64)
        return next(iter(self.tasks.values())).experts

    @property
    def sets(self) -> list[Ints]:
        """Return the sets of experts that may be pinned, one for each task."""
        return [task.experts for task in self.tasks.values()]

    def nearest(self, counts: Floats | Ints) -> str:
        """Find the task whose pattern of expert use is nearest to a prompt's.

        counts: how often the prompt used each expert, [experts of the model]

        The nearest pattern has the largest cosine. The first task is returned if all counts are 0.
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

        `offsets` [layers + 1] are the dense ids of the model's first expert in each layer.
        UsageError if the file cannot be read, is damaged, or is of another model.
        """
        content = read_json(
            path, FORMAT, "is no file of pinned experts", "greenroom trace hot", UsageError
        )
        if (version := content.value("version", None)) != VERSION:
            raise UsageError(
                f"{path} is a file of pinned experts of version {show_value(version)}, but this"
                f" Greenroom reads version {VERSION}: make it again with greenroom trace hot"
            )
        try:
            raw = content.object("tasks")
            tasks = {name: _task(raw.object(name), offsets) for name in raw}
        except Malformed as error:
            raise UsageError(f"{path} is damaged, or of another model: {error}") from error
        if not tasks:
            raise UsageError(
                f"{path} has no task with pinned experts: greenroom trace hot makes such files"
            )
        return cls(tasks, tuple(offsets))


def _task(raw: JsonObject, offsets: Sequence[int]) -> Task:
    ranges = list(pairwise(offsets))
    experts, pattern = (
        raw.list_of("experts", list_of(integer)),
        raw.list_of("pattern", list_of(number)),
    )
    if len(experts) != len(ranges) or [len(p) for p in pattern] != [b - a for a, b in ranges]:
        raise Malformed("a task does not have the model's numbers of layers and experts")
    for ids_in_layer, (a, b) in zip(experts, ranges, strict=True):
        if any(e >= b - a for e in ids_in_layer) or len({*ids_in_layer}) < len(ids_in_layer):
            raise Malformed(
                f"the pinned experts of a layer must be different numbers from 0 to {b - a - 1}"
            )
    ids = [
        a + e for ids_in_layer, (a, _) in zip(experts, ranges, strict=True) for e in ids_in_layer
    ]
    return Task(np.sort(np.array(ids, np.int64)), np.array([x for row in pattern for x in row]))
