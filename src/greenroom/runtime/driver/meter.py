"""Counters of a driver's transfers and stalls, in bytes and seconds since the start."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

CAUSES = ("miss", "late", "prefill")


@dataclass(slots=True)
class LinkMeter:
    """Counters of a link: delivered bytes, and seconds with a transfer in flight."""

    nbytes: int = 0
    busy_s: float = 0.0
    moving: int = 0
    since: float = 0.0

    def chunk_started(self, now: float) -> None:
        if self.moving == 0:
            self.since = now
        self.moving += 1

    def chunk_ended(self, now: float, nbytes: int) -> None:
        self.nbytes += nbytes
        self.moving -= 1
        if self.moving == 0:
            self.busy_s += now - self.since


@dataclass(slots=True)
class Meter:
    """Counters of a driver: traffic of links, stalls and decode passes.

    Bytes are those on disk.

    A stall is time in which a step only waits. Its cause is `prefill` in the steps of a prompt;
    otherwise `late` where the expert's prefetch had begun, else `miss`.

    decodes: passes that are not a prompt's; `decode_s` is their duration, `waited_s` and
        `computed_s` the parts of it in which they waited and computed experts
    """

    links: list[LinkMeter]
    stalls: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    passes: int = 0
    decodes: int = 0
    decode_s: float = 0.0
    waited_s: float = 0.0
    computed_s: float = 0.0
    host_s: float = 0.0  # in which the host processor computed misses
    at: float = field(default=0.0, compare=False)  # when this copy was made

    @classmethod
    def for_lanes(cls, lanes: Sequence[int]) -> Meter:
        return cls([LinkMeter() for _ in lanes])

    @property
    def bytes_read(self) -> int:
        """Number of bytes that were read from the store (the disk)."""
        return self.links[0].nbytes

    @property
    def stall_s(self) -> float:
        return sum(self.stalls.values())

    def add_decode(self, seconds: float, waited: float) -> None:
        """Add a decode pass that has ended to the driver's counters."""
        self.decodes += 1
        self.decode_s += seconds
        self.waited_s += waited

    def copy(self) -> Meter:
        """Copy the driver's counters, with the time of the copy."""
        links = [replace(link) for link in self.links]
        return replace(self, links=links, stalls=dict(self.stalls), at=time.perf_counter())


def subtract_counts(after: Any, before: Any) -> Any:
    """Subtract an earlier state of counters from a later state.

    They are numbers, or dataclasses, lists and dicts of them.
    """
    if is_dataclass(after) and not isinstance(after, type):
        changed = {
            f.name: subtract_counts(getattr(after, f.name), getattr(before, f.name))
            for f in fields(after)
        }
        return type(after)(**changed)
    if isinstance(after, dict):
        return {name: subtract_counts(value, before[name]) for name, value in after.items()}
    if isinstance(after, list):
        return [subtract_counts(a, b) for a, b in zip(after, before, strict=True)]
    return after - before
