"""What transfers cost, counted while they happen. Seconds and bytes since the start."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

CAUSES = ("miss", "late", "prefill")


@dataclass(slots=True)
class LinkMeter:
    """A link: the bytes that it delivered, and how long at least one lane of it carried some."""

    nbytes: int = 0
    busy_s: float = 0.0
    moving: int = 0
    since: float = 0.0

    def starts(self, now: float) -> None:
        if self.moving == 0:
            self.since = now
        self.moving += 1

    def ends(self, now: float, nbytes: int) -> None:
        self.nbytes += nbytes
        self.moving -= 1
        if self.moving == 0:
            self.busy_s += now - self.since


@dataclass(slots=True)
class Meter:
    """Bytes are those that the experts have on disk.

    A stall is time with nothing to compute but a wait. Its cause is that of what it waits for:
    `prefill` in a prompt's steps; in others `late`, an expert whose prefetch had begun, or `miss`.

    Of `decodes`, passes that are no prompt's: the seconds that they took, of which they waited and
    computed experts.
    """

    links: list[LinkMeter]
    stalls: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    passes: int = 0
    decodes: int = 0
    decode_s: float = 0.0
    waited_s: float = 0.0
    computed_s: float = 0.0
    host_s: float = 0.0  # in which the host's processor computed misses
    at: float = field(default=0.0, compare=False)  # when it was read

    @classmethod
    def for_lanes(cls, lanes: Sequence[int]) -> Meter:
        return cls([LinkMeter() for _ in lanes])

    @property
    def bytes_read(self) -> int:
        """Bytes that came from the store."""
        return self.links[0].nbytes

    @property
    def stall_s(self) -> float:
        return sum(self.stalls.values())

    def add_decode(self, seconds: float, waited: float) -> None:
        """A pass that is no prompt's is over."""
        self.decodes += 1
        self.decode_s += seconds
        self.waited_s += waited

    def copy(self) -> Meter:
        """As it is now."""
        links = [replace(link) for link in self.links]
        return replace(self, links=links, stalls=dict(self.stalls), at=time.perf_counter())


def subtract_counts(after: Any, before: Any) -> Any:
    """What was counted between two states of the same counts: numbers, or dataclasses, lists and
    dicts of them."""
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
