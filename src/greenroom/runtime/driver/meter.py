"""Counters of expert transfers, stalls and passes, in bytes and seconds since the start."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from greenroom.core.scheduler.step import Step

CAUSES = ("miss", "late", "prefill")


@dataclass(slots=True)
class LinkMeter:
    """Counters of a link from one memory to another: bytes delivered, and seconds in use.

    nbytes: bytes delivered, counted as on disk
    busy_s: seconds with at least one chunk in flight, up to the end of the last such time
    moving: chunks in flight
    since: time (`time.perf_counter`) since which a chunk has been in flight
    """

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

    def busy_until(self, now: float) -> float:
        """Return the seconds in use up to `now`, those of chunks in flight included.

        It takes no lock: while a chunk ends, the value may be too low for a moment.
        """
        busy, since = self.busy_s, self.since
        return busy + (max(0.0, now - since) if self.moving else 0.0)


@dataclass(slots=True)
class Meter:
    """Counters of an expert driver: traffic of links, stalls and decode passes.

    A stall is time in which an MoE layer only waits for experts. Its cause is `prefill` while a
    prompt is read; otherwise `late` if the prefetch of a missing expert had begun, else `miss`.

    stalls: seconds of stalls, by cause
    layer_stalls: seconds of stalls, by layer
    passes: forward passes begun
    decodes: complete passes that do not read a prompt
    decode_s: seconds of all decode passes
    waited_s: seconds in which decode passes waited for experts
    computed_s: seconds in which decode passes computed expert groups; layers that are computed
        together, because every expert of the model has a slot, are not counted
    """

    links: list[LinkMeter]
    stalls: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    layer_stalls: list[float] = field(default_factory=list)
    passes: int = 0
    decodes: int = 0
    decode_s: float = 0.0
    waited_s: float = 0.0
    computed_s: float = 0.0
    overtaken: int = 0  # predictions that a worker made too late
    host_s: float = 0.0  # seconds in which the host processor computed misses
    at: float = field(default=0.0, compare=False)  # time.perf_counter() of the latest `copy`

    @classmethod
    def for_lanes(cls, lanes: Sequence[int], layers: int = 0) -> Meter:
        return cls([LinkMeter() for _ in lanes], layer_stalls=[0.0] * layers)

    @property
    def bytes_read(self) -> int:
        """Number of bytes of experts that were read from the disk."""
        return self.links[0].nbytes

    @property
    def stall_s(self) -> float:
        return sum(self.stalls.values())

    def add_stall(self, layer: int, cause: str, seconds: float) -> None:
        """Count a time in which an MoE layer only waited for experts."""
        self.stalls[cause] += seconds
        self.layer_stalls[layer] += seconds

    def add_decode(self, seconds: float, waited: float) -> None:
        """Count a decode pass that has ended, with its seconds and the seconds it waited."""
        self.decodes += 1
        self.decode_s += seconds
        self.waited_s += waited

    def copy(self) -> Meter:
        """Return a copy of the counters, with the present time as `at`."""
        links = [replace(link) for link in self.links]
        return replace(
            self, links=links, stalls=dict(self.stalls), layer_stalls=[*self.layer_stalls],
            at=time.perf_counter(),
        )  # fmt: skip


def stall_cause(step: Step | None) -> str:
    """Return the cause of a stall that begins now, one of `CAUSES`."""
    if step is None or step.prefill:
        return "prefill"
    return "late" if step.late_pieces & step.missing.keys() else "miss"


def subtract_counts(after: Any, before: Any) -> Any:
    """Subtract an earlier state of counters from a later state, member by member.

    Both are numbers, or dataclasses, dicts or lists of numbers. ValueError if two lists differ in
    length.
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
