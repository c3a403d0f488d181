"""Decode while another process takes memory: how soon slots are given back, and at what cost.

    python benchmarks/pressure.py bench-data/moe1.7b-zipf1.5 --memory 3.4GB --limit 4.5GB

A memory cgroup of --limit holds a process that decodes, and after --seconds a second process, the
hog. The hog takes all memory that is free then, and half of the cache's (--take sets a share of the
free memory instead), at --rate bytes a second, keeps it for --seconds, and ends. Each round runs
once with `--pressure on` and once with `--pressure off`. A line for each:

    ended       who was ended by the kernel for want of memory
    release s   from the hog's first byte until the cache had given its first slots back; `after
                short`: from the moment when memory became short. That is when the hog, by its own
                log, had left less than the reserve of the memory that was free at its first byte;
                below 0 the cache gave slots back before
    slots       of the cache before the hog, the fewest while it lived, and at the end
    tokens/s    before, while the hog lived, and once the cache had its slots again
    back s      from the hog's end until the cache had its slots again
"""

from __future__ import annotations

import argparse
import json
import mmap
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import commit, machine, note, table
from memlimit import Cgroup, CgroupError, drop_page_cache, memory_cgroup, parse_bytes

PATIENCE_S = 60.0  # until the cache has grown back
CHUNK = 8 << 20
COLUMNS = (
    "pressure",
    "ended",
    "release s after first byte",
    "after short",
    "slots",
    "tokens/s before",
    "during",
    "after",
    "back s",
)


def decode(args: argparse.Namespace) -> None:
    """Decode until standard input ends; print a line of JSON for every tenth of a second."""
    import greenroom

    size = {"memory": args.memory} if args.memory else {"cache": args.cache}
    model = greenroom.load(
        str(args.model), pressure=args.pressure[0], threads=args.threads, **size
    )[0]
    import torch
    from worker import Passes, fill

    from greenroom.runtime.memory.system import available_bytes

    ends = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ends.set()), daemon=True).start()
    room = model.greenroom
    with torch.no_grad():
        passes = Passes(model)
        fill(passes)
        passes.prefill(32)
        cache_bytes = room.capacity * room.setup.catalog.slot_bytes
        reserve = None if room.pressure is None else room.pressure.stats()["reserve_bytes"]
        report(free=available_bytes(), cache=cache_bytes, slots=room.capacity, reserve=reserve)
        tokens, total, due = 0, 0, time.monotonic() + 0.1
        while not ends.is_set():
            passes.decode(1)
            tokens, total = tokens + 1, total + 1
            if total % 200 == 0:  # a new context, which stays short
                passes.prefill(32)
            if time.monotonic() >= due:
                report(tokens=tokens, slots=room.capacity)
                tokens, due = 0, time.monotonic() + 0.1
    changes = [] if room.pressure is None else room.pressure.changes
    report(changes=[(each.at, each.before, each.slots) for each in changes])


def report(**values: Any) -> None:
    print(json.dumps({"at": time.monotonic(), **values}), flush=True)


def hog(nbytes: int, rate: int) -> None:
    """Take memory at a rate, until standard input ends; report it after each chunk."""
    from greenroom.runtime.memory.system import available_bytes

    memory, chunk = mmap.mmap(-1, nbytes), b"x" * CHUNK
    report(begun=True, free=available_bytes(), taken=0)
    begin = time.monotonic()
    for start in range(0, nbytes, CHUNK):
        end = min(nbytes, start + CHUNK)
        memory[start:end] = chunk[: end - start]
        report(taken=end)
        time.sleep(max(0.0, (start + CHUNK) / rate - (time.monotonic() - begin)))
    report(done=True)
    sys.stdin.read()


class Process:
    """This script as a process in a cgroup, and the lines of JSON that it has printed."""

    def __init__(self, group: Cgroup, *arguments: str) -> None:
        command = [sys.executable, __file__, *arguments]
        enter = ["sh", "-c", 'echo 0 > "$0" && exec "$@"', str(group.procs), *command]
        self._process = subprocess.Popen(
            enter, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True,
        )  # fmt: skip
        self.lines: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.lines.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, key: str, seconds: float = 600) -> dict[str, Any]:
        """Return the first line with a key; SystemExit if the process ends without it."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._find(key) or not self._reader.is_alive(), timeout=seconds
            )
        line = self._find(key)
        if line is None:
            raise SystemExit(f"the process that decodes ended without {key!r}")
        return line

    def _find(self, key: str) -> dict[str, Any] | None:
        return next((line for line in self.lines if key in line), None)

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    @property
    def slots(self) -> int:
        return int(next(line["slots"] for line in reversed(self.lines) if "slots" in line))

    def end(self) -> bool:
        """Let the process end; return whether the kernel had ended it."""
        if self.lives and self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        self._reader.join()
        return self._process.returncode != 0


def run(args: argparse.Namespace, pressure: str) -> dict[str, Any]:
    """Measure one run beside the hog."""
    drop_page_cache([args.model] if args.model.exists() else [])
    size = ["--memory", args.memory] if args.memory else ["--cache", args.cache]
    options = [*size, "--pressure", pressure, "--threads", str(args.threads), "--decode"]
    with memory_cgroup(args.limit) as group:
        decoder = Process(group, str(args.model), *options)
        other = None
        try:
            first = decoder.wait_for("free")
            time.sleep(args.seconds)
            share = args.take if args.take is not None else 1 + first["cache"] / 2 / first["free"]
            nbytes = int(share * first["free"])
            other = Process(group, str(args.model), "--hog", str(nbytes), "--rate", str(args.rate))
            begin = other.wait_for("begun")["at"]
            end = begin + nbytes / args.rate + args.seconds
            while time.monotonic() < end and other.lives and decoder.lives:
                time.sleep(0.02)
            lost = ["hog"] if other.end() else []
            end = time.monotonic()
            while decoder.lives and decoder.slots < first["slots"]:
                time.sleep(0.05)
                if time.monotonic() > end + PATIENCE_S:
                    break
            back = time.monotonic()
            time.sleep(args.seconds if decoder.lives else 0)
        finally:
            lost_run = decoder.end()
            if other is not None:
                other.end()
    if lost_run:
        lost.append("run")
    short = short_at(other.lines, first["reserve"])
    return figures(decoder.lines, first, (begin, short, end, back), lost)


def short_at(lines: list[dict[str, Any]], reserve: int | None) -> float | None:
    """Return when memory became short, by the hog's log; None without a reserve, or if it did not.

    Memory is short once less than `reserve` is left of what was free at the hog's first byte. Slots
    that are given back meanwhile do not count.
    """
    if reserve is None:
        return None
    free = next(line["free"] for line in lines if "free" in line)
    times = (line["at"] for line in lines if "taken" in line and free - line["taken"] < reserve)
    return next(times, None)


def figures(
    lines: list[dict[str, Any]],
    first: dict[str, Any],
    times: tuple[float, float | None, float, float],
    lost: list[str],
) -> dict[str, Any]:
    """Return a run's figures; `times` are the hog's begin, the shortage, its end, and the return.

    The release is the first after the hog's first byte.
    """
    begin, short, end, back = times
    changes = next((line["changes"] for line in lines if "changes" in line), [])
    shrinks = [at for at, before, slots in changes if at >= begin and slots < before]
    slots = [line["slots"] for line in lines if "tokens" in line]
    return {
        "ended": " and ".join(lost) or "nobody",
        "release": min(shrinks) - begin if shrinks else None,
        "after short": min(shrinks) - short if shrinks and short is not None else None,
        "slots": (first["slots"], min(slots), slots[-1]),
        "before": rate(lines, first["at"], begin),
        "during": rate(lines, begin, end),
        "after": None if "run" in lost else rate(lines, back, float("inf")),
        "back": back - end if shrinks and slots[-1] >= first["slots"] else None,
    }


def reading_s(count: int = 200) -> float:
    """Return the processor time of a reading, in seconds."""
    from greenroom.runtime.memory.pressure import PressureSensor

    sensor = PressureSensor()
    sensor.read()
    begin = time.process_time()
    for _ in range(count):
        sensor.read()
    seconds = (time.process_time() - begin) / count
    sensor.close()
    return seconds


def rate(lines: list[dict[str, Any]], begin: float, end: float) -> float | None:
    """Return tokens a second between two times; None without a token."""
    inside = [line for line in lines if "tokens" in line and begin < line["at"] <= end]
    if len(inside) < 2:
        return None
    return float(sum(x["tokens"] for x in inside[1:]) / (inside[-1]["at"] - inside[0]["at"]))


def row(pressure: str, rounds: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return a line of the table: medians over rounds."""

    def middle(name: str, digits: str) -> str:
        values = [each[name] for each in rounds if each[name] is not None]
        return f"{median(values):{digits}}" if values else "-"

    ended = ", ".join(sorted({each["ended"] for each in rounds}))
    slots = " / ".join(
        str(int(median(column))) for column in zip(*(r["slots"] for r in rounds), strict=True)
    )
    speeds = (middle(name, ".3g") for name in ("before", "during", "after"))
    releases = middle("release", ".2f"), middle("after short", "+.2f")
    return pressure, ended, *releases, slots, *speeds, middle("back", ".1f")


def main() -> int:
    parser = argparse.ArgumentParser(description="decode while another process takes memory")
    parser.add_argument("model", type=Path, help="a folder, a GGUF file, or demo")
    parser.add_argument("--memory", help="budget of the process that decodes")
    parser.add_argument("--cache", default="100%", help="in place of --memory (default: 100%%)")
    parser.add_argument("--limit", type=parse_bytes, help="of the cgroup, as 4.5GB")
    parser.add_argument("--take", type=float, help="share of the free memory that the hog takes")
    parser.add_argument("--rate", type=parse_bytes, default=10**9, help="bytes a second (1GB)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each of the three phases")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pressure", nargs="+", default=["on", "off"], choices=["on", "off"])
    parser.add_argument("--decode", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--hog", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.decode:
        decode(args)
        return 0
    if args.hog is not None:
        hog(args.hog, args.rate)
        return 0
    if args.limit is None:
        parser.error("--limit is missing: give the cgroup's memory, as 4.5GB")
    print(f"commit {commit()}; {machine()}; {args.model.name}, {args.limit / 1e9:.3g} GB in all\n")
    rounds: dict[str, list[dict[str, Any]]] = {each: [] for each in args.pressure}
    try:
        for number in range(args.rounds):
            for pressure in args.pressure[:: -1 if number % 2 else 1]:
                rounds[pressure].append(run(args, pressure))
                note(f"{number + 1}/{args.rounds} --pressure {pressure}: {rounds[pressure][-1]}")
    except CgroupError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"a reading of the memory takes {reading_s() * 1e6:.0f} us of processor time\n")
    print(table(COLUMNS, [row(name, each) for name, each in rounds.items()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
