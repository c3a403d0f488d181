"""How many slots the expert cache has while other processes need memory.

The rule knows no clock and no files: it gets readings of the memory that is free, and returns a
number of slots. The page cache counts as free, since the kernel drops it for whoever needs memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

GIB = 1 << 30
LEAST_RESERVE, MOST_RESERVE = 16 << 20, GIB
PACE_S = 0.1  # shortest time over which the pace of other processes is measured
HORIZON_S = 0.3  # from a reading to the end of the release that it causes
FASTEST = 4 * GIB  # bytes a second that a process is assumed to take at most
SHORTEST_S, LONGEST_S = 0.05, 0.5  # between two readings
STEP = 4  # one shrink takes at most this part of the full cache: 1/4
GROWTH = 16  # and one growth 1/16
GROWTH_S = 1.0  # between two growths
CALM_S, MOST_CALM_S = 5.0, 320.0  # without shortage before the first growth


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Free memory at one moment.

    at:       time of the reading, in seconds of any clock
    free:     bytes that processes can still take: the least of the machine and of each cgroup
    resident: resident bytes of this process
    stalled:  whether processes have waited for memory since the last reading
    at_limit: whether a cgroup's limit was reached since then, if only by page cache
    """

    at: float
    free: int
    resident: int
    stalled: bool = False
    at_limit: bool = False


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Size of the expert cache in slots.

    least:    fewest slots with which a pass can run
    full:     slots that the memory budget allows
    capacity: slots now
    filled:   slots whose memory is in use
    """

    least: int
    full: int
    capacity: int
    filled: int


def reserve_for(free: int, to_take: int) -> int:
    """Return the bytes to leave free to others, for `PressureRule`.

    free:    bytes that are free now
    to_take: bytes that the run will still take within its budget

    It is a quarter of what will be left, from 16 MiB to 1 GiB. So a run that fills its budget sees
    no shortage, however close to the limit of memory its budget is. It is as much if a budget is
    too large by that, since the run will then get into the shortage by itself.
    """
    return min(max(abs(free - to_take) // 4, LEAST_RESERVE), MOST_RESERVE)


class PressureRule:
    """Decides when the expert cache shrinks and grows.

    - Memory is short if less than the reserve will be free in 0.3 s, as fast as other processes are
      growing. Where processes already wait for memory, or a cgroup is at its limit, it is short
      below twice the reserve.
    - The cache then shrinks until twice the reserve is free, or 2.5 times the reserve if it was
      short below twice: at once, by at most a quarter of the full cache at a time, never below the
      fewest slots with which a pass can run.
    - After 5 s without shortage it grows by a sixteenth a second, as far as twice the reserve stays
      free once all its slots are filled.
    - A growth that turns out too early doubles the 5 s, up to 320 s. They are 5 s again after a
      full cache was calm for 320 s.
    """

    def __init__(self, reserve: int, slot_bytes: int) -> None:
        self.reserve, self._slot_bytes = reserve, slot_bytes
        self.calm_s = CALM_S
        self._last: MemoryReading | None = None
        self._base: MemoryReading | None = None  # from which the pace is measured
        self._short_at = self._grown_at = float("-inf")
        self._growth = 0.0  # bytes a second that other processes take

    def decide(self, reading: MemoryReading, size: CacheSize) -> int:
        """Return the number of slots that the cache should have after a reading."""
        self._update_growth(reading)
        now, forecast = reading.at, self._forecast(reading)
        least, goal = (2, 2.5) if reading.stalled or reading.at_limit else (1, 2)  # reserves
        if forecast < least * self.reserve:
            return self._shrink(now, goal * self.reserve - forecast, size)
        if size.capacity >= size.full:
            if now - max(self._short_at, self._grown_at) >= MOST_CALM_S:
                self.calm_s = CALM_S
            return size.capacity
        if not self._may_grow(now):
            return size.capacity
        step = min(max(1, size.full // GROWTH), size.full - size.capacity)
        unfilled = size.capacity - size.filled + step
        if forecast - unfilled * self._slot_bytes < 2 * self.reserve:
            return size.capacity
        self._grown_at = now
        return size.capacity + step

    def next_reading_s(self, size: CacheSize) -> float:
        """Return the seconds until the next reading, after which memory may be short."""
        if self._last is None or size.capacity <= size.least:
            return LONGEST_S
        left = self._forecast(self._last) - 2 * self.reserve
        return min(max(left / FASTEST, SHORTEST_S), LONGEST_S)

    def _update_growth(self, reading: MemoryReading) -> None:
        """Estimate how fast other processes take memory; what this one takes does not count."""
        base, self._last = self._base, reading
        if base is None or reading.at < base.at:
            self._base, self._growth = reading, 0.0
            return
        difference = (base.free + base.resident) - (reading.free + reading.resident)
        seconds = reading.at - base.at
        growth = max(0.0, difference / max(seconds, PACE_S))
        if seconds < PACE_S:  # noise of a few megabytes in 2 ms is no pace
            self._growth = max(self._growth, growth)
            return
        self._base, self._growth = reading, growth

    def _forecast(self, reading: MemoryReading) -> float:
        return reading.free - self._growth * HORIZON_S

    def _may_grow(self, now: float) -> bool:
        return now - self._short_at >= self.calm_s and now - self._grown_at >= GROWTH_S

    def _shrink(self, now: float, missing: float, size: CacheSize) -> int:
        """Return fewer slots, so that `missing` bytes become free, as far as one step allows."""
        if self._grown_at > self._short_at:  # the first shortage since a growth
            recent = now - self._grown_at < 2 * self.calm_s
            self.calm_s = min(2 * self.calm_s, MOST_CALM_S) if recent else self.calm_s
        self._short_at = now
        most = max(1, size.full // STEP)
        step = min(max(1, ceil(missing / self._slot_bytes)), most)
        return min(size.capacity, max(size.least, min(size.capacity, size.filled) - step))
