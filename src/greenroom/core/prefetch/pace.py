"""The measured times between layers and between chunks of transfers, while a model runs.

All times are moving averages, in seconds; those between layers are separate for prefill and decode.
A value is None until it has been measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field

KEEP = 0.9  # weight of the past at each sample: about the last ten count


@dataclass(slots=True)
class Average:
    """An exponential moving average; None before the first sample."""

    value: float | None = None

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else KEEP * self.value + (1 - KEEP) * sample


@dataclass(slots=True)
class Pace:
    """Moving averages of a link's idle time per layer and time per chunk.

    The link is the first one (from disk), or a device's link if host memory has slots for all
    experts.

    idle:  seconds from one layer's routing to the next one's in which no transfer that a layer
           needs was under way or waiting, (decode, prefill)
    chunk: seconds from one chunk's arrival to the next one's, while the link is busy
    """

    idle: tuple[Average, Average] = field(default_factory=lambda: (Average(), Average()))
    chunk: Average = field(default_factory=Average)
    _routed: float | None = None
    _busy_since: float | None = None  # since when the first link has been busy
    _demand_since: float | None = None
    _demand_s: float = 0.0

    def routed(self, now: float, prefill: bool, same_pass: bool) -> None:
        """Record when a layer was routed, to average the link's idle time per layer.

        The time between two passes is not counted.
        """
        self._settle(now)
        if same_pass and self._routed is not None and now > self._routed:
            self.idle[prefill].add(max(0.0, now - self._routed - self._demand_s))
        self._routed, self._demand_s = now, 0.0

    def paused(self) -> None:
        """Leave the time until the next layer's routing out of the averages."""
        self._routed = None

    def link(self, now: float, moving: int, demanding: bool, landed: bool) -> None:
        """Record how many chunks a link carries now, to average its busy and idle times.

        moving:    the number of chunks on the link; 0: it is idle
        demanding: transfers that a step waits for are under way or waiting
        landed:    the link has just delivered a chunk
        """
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
