"""Memory cgroups of this process: limits, free memory, and how often a limit was reached."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """A memory cgroup: its folder, and the names of its files and fields.

    limits:      files with limits; `memory.high` slows processes down, the others end them
    usage:       file with the bytes in use
    reclaimable: fields of `memory.stat` that the kernel frees for whoever needs memory
    shared:      field with the bytes of shared memory, which `reclaimable` contains
    events:      file that counts how often a limit was reached
    """

    folder: Path
    limits: tuple[str, ...]
    usage: str
    reclaimable: tuple[str, ...]
    shared: str
    events: str

    @classmethod
    def v1(cls, folder: Path) -> MemoryCgroup:
        limits, usage = ("memory.limit_in_bytes",), "memory.usage_in_bytes"
        return cls(folder, limits, usage, ("total_cache",), "total_shmem", "memory.failcnt")

    @classmethod
    def v2(cls, folder: Path) -> MemoryCgroup:
        limits, reclaimable = ("memory.max", "memory.high"), ("file", "slab_reclaimable")
        return cls(folder, limits, "memory.current", reclaimable, "shmem", "memory.events")

    def free_bytes(self) -> int | None:
        """Return the bytes that its processes can still take; None if it has no limit.

        The page cache counts as free.
        """
        limits = [text for each in self.limits if (text := self._read(each).strip()).isdigit()]
        usage = self._read(self.usage).strip()
        if not limits or not usage.isdigit():  # a limit may be "max"
            return None
        lines = (line.split() for line in self._read("memory.stat").splitlines())
        stat = {name: int(value) for name, value in lines}
        reclaimable = sum(stat.get(name, 0) for name in self.reclaimable)
        used = int(usage) - reclaimable + stat.get(self.shared, 0)
        return max(min(map(int, limits)) - used, 0)

    def is_readable(self) -> bool:
        """Return whether its usage and its first limit can be read."""
        return bool(self._read(self.limits[0]) and self._read(self.usage))

    def limit_hits(self) -> int:
        """Return how often `memory.high`, or the limit that ends processes, was reached."""
        lines = (line.split() for line in self._read(self.events).splitlines())
        return sum(int(line[-1]) for line in lines if len(line) == 1 or line[0] in ("high", "max"))

    def _read(self, name: str) -> str:
        with contextlib.suppress(OSError):
            return (self.folder / name).read_text()
        return ""


def memory_cgroups(membership: Path = MEMBERSHIP, root: Path = ROOT) -> list[MemoryCgroup]:
    """Return this process's memory cgroup and its ancestors, of cgroup v1 and v2.

    `membership` is the file that lists a process's cgroups, `root` where they are mounted. The
    list is empty where the system has no cgroups.
    """
    groups = []
    with contextlib.suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                top, make = root, MemoryCgroup.v2
            elif "memory" in controllers.split(","):
                top, make = root / "memory", MemoryCgroup.v1
            else:
                continue
            folder = top / path.strip("/")
            groups += [make(each) for each in (folder, *folder.parents) if each.is_relative_to(top)]
    return groups
