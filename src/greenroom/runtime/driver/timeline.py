"""Timelines of a run in Chrome's trace event format (chrome://tracing, ui.perfetto.dev).

One row shows computation; each lane of a link between two memories has a row of its own. Any
thread appends events without a lock. A timeline stores the latest `limit` events, about 400 bytes
each.

The file is JSON: `{"traceEvents": [...], "displayTimeUnit": "ms", "otherData": {...}}`. Spans of
time are complete events (`ph` X), the names of rows are metadata (M), and an instant (i) shows
where earlier events were dropped.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from greenroom.core.events import HOST, ComputeGroup, StartChunk
from greenroom.trace.container import atomic_file

LIMIT = 100_000  # events
COMPUTE = "compute"  # the row of expert groups and stalls
PREDICT = "predict"  # the row of the predictor's calls
ON_HOST = "compute on the host"  # the row of groups that the host processor computes
_PID = 1


def lane(link: str, number: int) -> str:
    """Return the name of a transfer lane's row in a timeline: "disk -> host, lane 0"."""
    return f"{link}, lane {number}"


# number among all recorded, row, name, begin and end in seconds, args
_Event = tuple[int, str, str, float, float, dict[str, Any]]


class Timeline:
    """Recording of a run's computation, transfers and stalls as spans of time.

    The latest `limit` events are stored. The file also says how many experts each layer has, so
    that experts' ids can be read.
    """

    def __init__(self, limit: int = LIMIT, experts_per_layer: Sequence[int] = ()) -> None:
        self.experts_per_layer = list(experts_per_layer)
        self.origin = time.perf_counter()
        self._events: deque[_Event] = deque(maxlen=limit)
        self._numbers = itertools.count()

    def add_span(self, row: str, name: str, begin: float, end: float, **args: Any) -> None:
        """Add a span of time to a row of the timeline.

        `begin` and `end` are seconds of `time.perf_counter`. Spans of a row may nest, but not
        overlap otherwise. `args` are shown with the span: numbers, strings, or lists of these.
        """
        self._events.append((next(self._numbers), row, name, begin, end, args))

    def add_group(self, layer: int, group: ComputeGroup, begin: float) -> None:
        """Add an expert group to a timeline, as computed from `begin` until now.

        `begin` is in seconds of `time.perf_counter`.
        """
        name = f"layer {layer}: {group.experts.size} experts"
        place = ON_HOST if group.device == HOST else COMPUTE
        ids = group.experts.astype(np.int32)  # a list would take nine times the memory
        self.add_span(place, name, begin, time.perf_counter(), layer=layer, experts=ids)

    def add_stall(self, layer: int, cause: str, begin: float, end: float) -> None:
        """Add a wait of the thread that computes, in seconds of `time.perf_counter`."""
        self.add_span(COMPUTE, f"stall: {cause}", begin, end, layer=layer)

    def add_chunk(self, link: str, action: StartChunk, begin: float, end: float) -> None:
        """Add the transfer of a chunk of an expert over a link to a timeline.

        `begin` and `end` are in seconds of `time.perf_counter`.
        """
        self.add_span(
            lane(link, action.lane), "demand" if action.demand else "prefetch", begin, end,
            expert=action.piece, chunk=action.chunk, slot=action.slot,
        )  # fmt: skip

    def __len__(self) -> int:
        """Return the number of events that are stored in a timeline."""
        return len(self._events)

    def save(self, path: str | Path) -> None:
        """Write a timeline's events to a JSON file, atomically.

        Raises OutputError if the file cannot be written.
        """
        events = sorted(self._events.copy())
        dropped = events[0][0] if events else 0
        note = {
            "microseconds": "since recording started",
            "dropped": dropped,
            "experts_per_layer": self.experts_per_layer,
            "note": f"the first {dropped} events were dropped, the latest {len(events)} are stored"
            if dropped
            else "all events are stored",
        }
        target = Path(path)
        with atomic_file(target) as file:
            file.write(b'{"displayTimeUnit": "ms", "otherData": ')
            file.write(json.dumps(note).encode() + b', "traceEvents": [\n')
            for n, event in enumerate(self._as_json(events, dropped)):
                file.write((",\n" if n else "").encode() + json.dumps(event).encode())
            file.write(b"\n]}\n")

    def _as_json(self, events: list[_Event], dropped: int) -> Iterator[dict[str, Any]]:
        names = sorted({event[1] for event in events} - {COMPUTE})
        rows = {row: tid for tid, row in enumerate([COMPUTE, *names])}
        yield _named("process_name", 0, name="greenroom")
        for row, tid in rows.items():
            yield _named("thread_name", tid, name=row)
            yield _named("thread_sort_index", tid, sort_index=tid)
        if dropped:
            name, at = f"{dropped} earlier events were dropped", self._micros(events[0][3])
            yield {"ph": "i", "name": name, "ts": at, "pid": _PID, "tid": 0, "s": "g"}
        for _, row, name, begin, end, args in events:
            yield {
                "ph": "X",
                "name": name,
                "cat": name.split(" ")[0],
                "ts": self._micros(begin),
                "dur": max(0.0, round((end - begin) * 1e6, 3)),
                "pid": _PID,
                "tid": rows[row],
                "args": {key: _plain(value) for key, value in args.items()},
            }

    def _micros(self, at: float) -> float:
        return round((at - self.origin) * 1e6, 3)


def _named(what: str, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PID, "tid": tid, "args": args}


def _plain(value: Any) -> Any:
    """Convert a value for JSON: NumPy types become Python's, NaN and infinity strings."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
