"""Frames of a timeline (`greenroom run --timeline FILE`), by the times of its events.

A timeline has the transfers of experts and the experts of each group that was computed. An expert
is in memory from the end of its transfer until another expert's transfer to the same slot; what was
in memory before the timeline began is unknown until it is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from greenroom.core.scheduler.view import ExpertState
from greenroom.drawing.frames import (
    LevelSlices,
    all_levels,
    flags_text,
    greeting,
    most_frames,
    states_text,
)
from greenroom.errors import TraceError
from greenroom.json_file import JsonObject, Malformed, integer, read_object
from greenroom.runtime.driver.meter import LinkMeter
from greenroom.trace.trace import MOST_EXPERTS

LONGEST = 128 << 20  # bytes of a file
MOST_LAYERS, MOST_IN_ALL, MOST_LINKS = 1 << 10, 1 << 18, 64  # layers, experts, links
MOST_FRAMES = 1500
SHORTEST_S = 0.02  # between two frames
DEMAND, PREFETCH, LANE = "demand", "prefetch", ", lane "  # names of transfers, and of rows
BEGIN, END = "begin", "end"  # kinds of changes by a transfer


class Change(NamedTuple):
    """Begin of a transfer, or end of any event of a timeline."""

    at: float
    kind: str
    where: str  # the name of the event's row
    seconds: float
    args: JsonObject
    demand: bool = False  # a layer waited for the transfer


def timeline_frames(path: Path, title: str) -> dict[str, Any]:
    """Return a recording of a timeline for the live page: a greeting, and frames.

    TraceError if the file is damaged, or is no timeline.
    """
    file = read_object(path, TraceError, LONGEST)
    try:
        changes, sizes = _changes(file), _sizes(file)
        state = TimelineState(sizes, changes)
        return _recording(state, changes, title)
    except Malformed as error:
        raise TraceError(f"{path} is no timeline of greenroom: {error}") from error


def _sizes(file: JsonObject) -> tuple[int, ...]:
    def size(value: Any, where: str) -> int:
        return integer(value, where, 1, MOST_EXPERTS)

    sizes = file.object("otherData").list_of("experts_per_layer", size)
    if not 1 <= len(sizes) <= MOST_LAYERS:
        raise Malformed(f"otherData.experts_per_layer must have 1 to {MOST_LAYERS} layers")
    if sum(sizes) > MOST_IN_ALL:
        raise Malformed(f"it has {sum(sizes)} experts, more than {MOST_IN_ALL}")
    return sizes


def _changes(file: JsonObject) -> list[Change]:
    """Read the events of a timeline: two changes for each transfer, one for each other span."""
    events = file.list_of("traceEvents", JsonObject)
    rows = {
        event.integer("tid"): event.object("args").text("name")
        for event in events
        if event.text("ph") == "M" and event.text("name") == "thread_name"
    }
    changes = []
    for event in events:
        if event.text("ph") != "X":
            continue
        row, name = rows.get(event.integer("tid"), ""), event.text("name")
        begin, seconds = _seconds(event, "ts"), _seconds(event, "dur")
        args, transfer = event.object("args", {}), LANE in row and name in (DEMAND, PREFETCH)
        if transfer:
            changes.append(Change(begin, BEGIN, row, seconds, args))
        kind = END if transfer else name.partition(" ")[0].rstrip(":")
        changes.append(Change(begin + seconds, kind, row, seconds, args, name == DEMAND))
    if not changes:
        raise Malformed("it has no events")
    return sorted(changes, key=lambda change: change.at)


def _seconds(event: JsonObject, name: str) -> float:
    value = event.value(name)
    if type(value) not in (int, float) or not abs(value) < 1e15:
        raise Malformed(f"{name} of an event must be a time in microseconds")
    return max(0.0, float(value) / 1e6)


def _recording(state: TimelineState, changes: list[Change], title: str) -> dict[str, Any]:
    begin, end = changes[0].at, changes[-1].at
    count = most_frames(state.uses.size, MOST_FRAMES)
    every = max(SHORTEST_S, (end - begin) / count)
    frames, place = [], 0
    for number in range(1, int((end - begin) / every) + 2):
        until = begin + number * every
        while place < len(changes) and changes[place].at <= until:
            state.apply(changes[place])
            place += 1
        frames.append(state.frame(number * every, every))
    first = greeting(
        "timeline", title, state.sizes,
        unit="s", span=round(end - begin, 3), frames_per_s=1 / every, links=state.links,
        levels=all_levels(np.zeros_like(state.uses), state.offsets),
        about=["experts in memory before the recording are unknown until they are used"],
    )  # fmt: skip
    return {"greeting": first, "frames": frames}


class TimelineState:
    """The state of experts, links and passes at one time of a timeline."""

    def __init__(self, sizes: tuple[int, ...], changes: list[Change]) -> None:
        self.sizes = sizes
        self.offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._experts = int(self.offsets[-1])
        rows = {change.where for change in changes if change.kind == BEGIN}
        self.links = sorted({row.rpartition(LANE)[0] for row in rows})
        if len(self.links) > MOST_LINKS:
            raise Malformed(f"it has {len(self.links)} links, more than {MOST_LINKS}")
        self._meters = [LinkMeter() for _ in self.links]
        self._states = np.full(self._experts, ExpertState.ABSENT, np.uint8)
        self._owners: dict[int, int] = {}  # the expert in each slot
        self.uses = np.zeros(self._experts, np.int64)
        self._used = np.zeros(self._experts, np.bool_)
        self._stalls = [0.0] * len(sizes)
        self._tokens = 0
        self._answered: list[tuple[float, float]] = []  # end of a prompt, and its seconds
        self.slices = LevelSlices(self.offsets)

    def apply(self, change: Change) -> None:
        """Change the state by what begins or ends."""
        args, seconds = change.args, change.seconds
        if change.kind in (BEGIN, END):
            self._transfer(change)
        elif change.kind == "layer":
            ids = np.array(args.list_of("experts", integer, ()), np.int64)
            if ids.size and ids.max() >= self._experts:
                raise Malformed(f"it has the expert {ids.max()} of {self._experts}")
            self.uses[ids] += 1
            self._used[ids] = True
            self._states[ids] = ExpertState.RESIDENT
        elif change.kind == "stall":
            self._stalls[args.integer("layer", most=len(self.sizes) - 1)] += seconds
        elif change.kind == "token":
            self._tokens += 1
        elif change.kind == "prompt":
            self._answered.append((change.at, seconds))

    def _transfer(self, change: Change) -> None:
        meter = self._meters[self.links.index(change.where.rpartition(LANE)[0])]
        piece, begins = change.args.integer("expert"), change.kind == BEGIN
        if begins:
            meter.chunk_started(change.at)
        else:
            meter.chunk_ended(change.at, 0)
        if piece >= self._experts:  # a bottom segment, or a low-precision copy
            return
        if not begins:
            landed = ExpertState.RESIDENT if change.demand else ExpertState.PREFETCHED
            self._states[piece] = landed
            return
        self._states[piece] = ExpertState.IN_FLIGHT
        if (slot := change.args.integer("slot", least=-1)) >= 0:
            owner = self._owners.get(slot, piece)
            if owner != piece:
                self._states[owner] = ExpertState.ABSENT
            self._owners[slot] = piece

    def frame(self, at: float, every: float) -> dict[str, Any]:
        """Return a frame of the state, `at` seconds after the first event."""
        answered, self._answered = self._answered, []
        frame = {
            "t": round(at, 3),
            "tokens": [0, self._tokens],
            "answered": [[0, round(seconds, 4)] for _, seconds in answered],
            "stalls": [round(1000 * seconds) for seconds in self._stalls],
            "links": [
                [None, round(meter.busy_s, 4), None, None, meter.moving] for meter in self._meters
            ],
            "states": states_text(self._states),
            "used": flags_text(self._used),
            "levels": self.slices.encode(self.uses),
        }
        self._used[:] = False
        return frame
