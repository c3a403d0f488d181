"""Pace: how fast layers follow one another and chunks arrive, as seen while it runs. Seconds.

It is told when things happen; what it knows are moving averages, apart for prefill and decode.
Unknown is None: nothing has been seen yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field

KEEP = 0.9  # what an average keeps at each sample: about the last ten count


@dataclass(slots=True)
class Average:
    """An exponential moving average."""

    value: float | None = None

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else KEEP * self.value + (1 - KEEP) * sample


@dataclass(slots=True)
class Pace:
    """`idle`: seconds of the link, from one layer's routing to the next one's, in which no demand
    was under way or waited, [decode, prefill]; `chunk`: seconds from one chunk's arrival to the
    next one's while the first link is busy."""

    idle: tuple[Average, Average] = field(default_factory=lambda: (Average(), Average()))
    chunk: Average = field(default_factory=Average)
    _routed: float | None = None
    _busy_since: float | None = None  # the first link: with whatever
    _demand_since: float | None = None
    _demand_s: float = 0.0

    def routed(self, now: float, prefill: bool, same_pass: bool) -> None:
        """A layer's routing is known; between passes anything may lie, and that does not count."""
        self._settle(now)
        if same_pass and self._routed is not None and now > self._routed:
            self.idle[prefill].add(max(0.0, now - self._routed - self._demand_s))
        self._routed, self._demand_s = now, 0.0

    def paused(self) -> None:
        """What comes next does not follow from what was."""
        self._routed = None

    def link(self, now: float, moving: int, demanding: bool, landed: bool) -> None:
        """`moving` chunks are on their way now, and demands are waited for or not; `landed`: the
        first link has just delivered one."""
        if landed and self._busy_since is not None and now > self._busy_since:
            self.chunk.add(now - self._busy_since)
            self._busy_since = now
        if moving == 0:
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = now
        if demanding and self._demand_since is None:
            self._demand_since = now
        elif not demanding and self._demand_since is not None:
            self._settle(now)
            self._demand_since = None

    def _settle(self, now: float) -> None:
        if self._demand_since is not None:
            self._demand_s += now - self._demand_since
            self._demand_since = now
