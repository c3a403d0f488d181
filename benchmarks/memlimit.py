"""Run a command in its own memory cgroup, with a cold page cache.

    python benchmarks/memlimit.py 1.6GiB bench-data/moe1.7b-zipf1.0 -- command ...

The limit holds for everything the kernel charges to the command: its own memory and the page
cache of the files it reads. So an engine that maps its weights or reads them through the page
cache is held to the same limit as one that reads past it. Cold: the files named (or the files in
the folders named) are dropped from the page cache first.

Prints the command's standard output, then one line of JSON: return code, wall and CPU seconds,
bytes read from disk, major page faults, peak of the cgroup. A limit of 0 means none.

Works with cgroup v1 and v2, where the user may make cgroups: as root, or in a scope of one's own
(`systemd-run --user --scope python benchmarks/...`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
UNITS = {"": 1, "MB": 10**6, "MIB": 1 << 20, "GB": 10**9, "GIB": 1 << 30}


class CgroupError(Exception):
    """Memory cgroups cannot be made here; the message has the reason and a remedy."""


@dataclass(frozen=True)
class Cgroup:
    """The control files of one cgroup; v1 and v2 name them differently."""

    folder: Path
    limit: str
    peak: str
    usage: str
    events: str

    @property
    def procs(self) -> Path:
        return self.folder / "cgroup.procs"

    def peak_bytes(self) -> int | None:
        """Peak of the cgroup's memory; None if the kernel has no peak (v2 before Linux 5.19)."""
        path = self.folder / self.peak
        return int(path.read_text()) if path.exists() else None

    def usage_bytes(self) -> int:
        """Memory of the cgroup now, with the page cache that is charged to it."""
        return int((self.folder / self.usage).read_text())

    def kills(self) -> int:
        """How many of its processes the kernel has ended for want of memory."""
        lines = (line.split() for line in (self.folder / self.events).read_text().splitlines())
        return next((int(count) for name, count in lines if name == "oom_kill"), 0)


@dataclass(frozen=True)
class Measured:
    """Resources of one run. `peak_bytes` is the cgroup's: memory and page cache."""

    limit_bytes: int
    returncode: int
    killed: bool  # by the kernel, for want of memory, or by the timeout
    wall_s: float
    cpu_s: float
    disk_bytes: int
    major_faults: int
    peak_bytes: int | None
    marked_s: float | None = None  # until the first line of errors with the requested text


def parse_bytes(text: str) -> int:
    """Parse a size such as `1.6GiB`, `500MB` or a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if match is None or match[2].upper() not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write it as 1.6GiB or 500MB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def drop_page_cache(paths: Sequence[Path]) -> None:
    """Drop the files' pages from the page cache; pages that a live process maps stay."""
    os.sync()
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file():
                handle = os.open(file, os.O_RDONLY)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(handle)


def _parents() -> list[tuple[Path, bool]]:
    """Possible parents of a child cgroup, best first; True for v2."""
    entries = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in entries:
        if "memory" in controllers.split(","):
            return [(ROOT / "memory" / path.lstrip("/"), False), (ROOT / "memory", False)]
    for _, controllers, path in entries:
        if not controllers and (ROOT / "cgroup.controllers").exists():
            own_group = ROOT / path.lstrip("/")  # v2 wants no processes beside children: a sibling
            return (
                [(own_group, True), (own_group.parent, True)]
                if own_group != ROOT
                else [(own_group, True)]
            )
    return []


def _make(parent: Path, v2: bool, limit_bytes: int) -> Cgroup:
    """Create a child cgroup; OSError where that is not allowed."""
    folder = parent / f"bench-{os.getpid()}"
    if v2 and "memory" not in (parent / "cgroup.subtree_control").read_text().split():
        (parent / "cgroup.subtree_control").write_text("+memory")
    folder.mkdir()
    try:
        if v2:
            group = Cgroup(folder, "memory.max", "memory.peak", "memory.current", "memory.events")
            swap = folder / "memory.swap.max"
            if swap.exists():
                swap.write_text("0")
        else:
            group = Cgroup(
                folder, "memory.limit_in_bytes", "memory.max_usage_in_bytes",
                "memory.usage_in_bytes", "memory.oom_control",
            )  # fmt: skip
            (folder / "memory.swappiness").write_text("0")
        (folder / group.limit).write_text(str(limit_bytes))
    except OSError:
        folder.rmdir()
        raise
    return group


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Cgroup]:
    """Context with a child cgroup that has a memory limit.

    The cgroup is removed at the end. Raises CgroupError if this process cannot make one.
    """
    group, reason = None, "no memory controller is mounted"
    for parent, v2 in _parents():
        try:
            group = _make(parent, v2, limit_bytes)
            break
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}"
    if group is None:
        raise CgroupError(
            f"cannot make a memory cgroup ({reason}): run as root, or in a scope of your own"
            " (systemd-run --user --scope ...), or without a limit"
        )
    try:
        yield group
    finally:
        for _ in range(100):  # the last pages of a killed process take a moment
            try:
                group.folder.rmdir()
                break
            except OSError:
                time.sleep(0.05)


def run_limited(
    command: Sequence[str],
    limit_bytes: int = 0,
    cold: Sequence[Path] = (),
    timeout_s: float | None = None,
    env: dict[str, str] | None = None,
) -> tuple[Measured, str, str]:
    """Run a command to its end in a memory cgroup; a limit of 0 is no limit.

    Return (measured resources, standard output, standard error).
    """
    drop_page_cache(cold)
    if not limit_bytes:
        return run_in(None, command, 0, timeout_s, env)
    with memory_cgroup(limit_bytes) as group:
        return run_in(group, command, limit_bytes, timeout_s, env)


def run_in(
    group: Cgroup | None,
    command: Sequence[str],
    limit_bytes: int,
    timeout_s: float | None = None,
    env: dict[str, str] | None = None,
    mark: str = "",
) -> tuple[Measured, str, str]:
    """Run a command to its end in a cgroup; `mark` is a text whose first appearance is timed."""
    if group is not None:  # the shell enters the cgroup, then becomes the command
        command = ["sh", "-c", 'echo 0 > "$0" && exec "$@"', str(group.procs), *command]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **(env or {})},
    )
    marks: list[float] = []
    source = process.stderr
    assert source is not None
    lines: list[str] = []

    def read_errors() -> None:
        for line in source:
            lines.append(line)
            if mark and mark in line and not marks:
                marks.append(time.perf_counter() - start)

    process.stderr = None  # `communicate` reads the other pipe only
    reader = threading.Thread(target=read_errors, daemon=True)
    reader.start()
    try:
        out, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
    reader.join()
    source.close()
    err = "".join(lines)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    measured = Measured(
        limit_bytes=limit_bytes,
        returncode=process.returncode,
        killed=process.returncode == -9,
        wall_s=wall,
        cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        disk_bytes=(after.ru_inblock - before.ru_inblock) * 512,
        major_faults=after.ru_majflt - before.ru_majflt,
        peak_bytes=group.peak_bytes() if group else None,
        marked_s=marks[0] if marks else None,
    )
    return measured, out, err


def main() -> int:
    parser = argparse.ArgumentParser(description="run a command in a memory cgroup, cold")
    parser.add_argument("limit", type=parse_bytes, help="such as 1.6GiB; 0 means no limit")
    parser.add_argument("cold", type=Path, nargs="*", help="files or folders to drop")
    if "--" not in sys.argv:
        parser.error("there is no command: write it after --")
    split = sys.argv.index("--")
    args = parser.parse_args(sys.argv[1:split])
    try:
        measured, out, err = run_limited(sys.argv[split + 1 :], args.limit, args.cold)
    except CgroupError as error:
        print(error, file=sys.stderr)
        return 2
    sys.stdout.write(out)
    sys.stderr.write(err)
    print(json.dumps(asdict(measured)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
