"""Read how short memory is: free memory, and whether processes wait for it (Linux PSI)."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from greenroom.core.cache.pressure import MemoryReading
from greenroom.runtime.memory.cgroups import MemoryCgroup, memory_cgroups
from greenroom.runtime.memory.system import available_bytes, own_rss_bytes

STALL_SHARE = 0.1  # of the time, in which some process waited for memory
# A trigger of PSI: 150 ms of waiting within 2 s, the shortest window without privileges.
TRIGGER = b"some 150000 2000000\0"
PRESSURE = Path("/proc/pressure/memory")
PRESSURE_FILE = "memory.pressure"  # of a cgroup v2


class PressureSensor:
    """Reads how short memory is for this process.

    `wait` ends early where the kernel reports that processes wait for memory. Without PSI (pressure
    stall information), or without the right to set a trigger, it only waits for the time given.
    """

    def __init__(
        self,
        pressure: Path = PRESSURE,
        cgroups: Callable[[], Sequence[MemoryCgroup]] = memory_cgroups,
    ) -> None:
        self._pressure, self._cgroups = pressure, cgroups
        self._at = time.monotonic()
        groups = cgroups()
        self._hits, self._stalls = self._count(groups)
        self._pid, self._stopped = os.getpid(), False
        self._resident, self._readable = 0, set[Path]()  # at the last reading
        self._triggers: list[int] = []
        self._poll = select.poll()
        self._wake_end, self._wake = os.pipe()
        try:
            os.set_blocking(self._wake_end, False)
            self._poll.register(self._wake_end, select.POLLIN)
            own_group = [each.folder / PRESSURE_FILE for each in groups[:1]]
            for path in (pressure, *own_group):
                with contextlib.suppress(OSError):  # no PSI, or no right
                    self._add_trigger(path)
        except BaseException:
            self.close()
            raise

    @property
    def triggers(self) -> int:
        """The number of PSI files that end a `wait` early."""
        return len(self._triggers)

    def _add_trigger(self, path: Path) -> None:
        trigger = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        try:
            os.write(trigger, TRIGGER)
            self._poll.register(trigger, select.POLLPRI)
        except BaseException:
            os.close(trigger)
            raise
        self._triggers.append(trigger)

    def read(self) -> MemoryReading | None:
        """Return the free memory now, and whether processes have waited since the last call.

        None, but never at the first call, if the process's size or the limit of a cgroup cannot be
        read any more: what is left would be wrong.
        """
        groups, now, resident = self._cgroups(), time.monotonic(), own_rss_bytes()
        readable = {each.folder for each in groups if each.is_readable()}
        missing = self._readable.intersection(each.folder for each in groups) - readable
        if (self._resident and not resident) or missing or (self._readable and not groups):
            return None
        self._resident, self._readable = resident, readable
        hits, stalls = self._count(groups)
        limit_s = STALL_SHARE * (now - self._at)
        waited = any(s - self._stalls.get(path, s) > limit_s for path, s in stalls.items())
        hit = any(n > self._hits.get(path, n) for path, n in hits.items())
        self._at, self._hits, self._stalls = now, hits, stalls
        return MemoryReading(now, available_bytes(groups), resident, waited, hit)

    def _count(self, groups: Sequence[MemoryCgroup]) -> tuple[dict[Path, int], dict[Path, float]]:
        """Count so far, by file: limits that were reached, and seconds of waiting for memory."""
        hits = {each.folder: each.limit_hits() for each in groups}
        paths = [self._pressure, *(each.folder / PRESSURE_FILE for each in groups)]
        return hits, {path: stalled_s(path) for path in paths}

    def wait(self, seconds: float) -> None:
        """Wait for some seconds, or until processes wait for memory, or until `stop_waiting`."""
        if self._stopped:
            return
        for handle, event in self._poll.poll(seconds * 1000):
            if handle == self._wake_end:
                os.read(handle, 4096)
            elif event & select.POLLERR:  # the cgroup was removed
                self._poll.unregister(handle)

    def stop_waiting(self) -> None:
        """End a `wait` of another thread, and all later ones.

        A forked child shares the pipe, so it does nothing there.
        """
        if os.getpid() != self._pid:
            return
        self._stopped = True
        os.write(self._wake, b"\0")

    def close(self) -> None:
        """Close the sensor's files; it must not be used afterwards."""
        for each in (self._wake_end, self._wake, *self._triggers):
            os.close(each)


def stalled_s(path: Path) -> float:
    """Return the seconds of waiting for memory that a PSI file counts.

    0 without the file. Processes that wait at the same time count once.
    """
    with contextlib.suppress(OSError, ValueError):
        first = path.read_text().partition("\n")[0]
        return int(first.rpartition("total=")[2]) / 1e6
    return 0.0
