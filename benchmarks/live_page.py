"""Cost of the live page: bytes a second, and processor time with and without a page that watches.

    python benchmarks/live_page.py [--model demo] [--cache 25%] [--seconds 10] [--rounds 4]

Starts `greenroom serve`, and measures intervals in turn: without a page and with one, while the
server is idle and while it generates. Frames are made and sent in the thread of the event loop, so
the difference of its processor time is what a page costs. Processor time is in percent of one core.

The second table is of frames alone, without a server, for grids of layers and experts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from common import commit, machine, note, table

from greenroom.core.scheduler.view import ExpertState
from greenroom.hf.attach.snapshot import by_layer
from greenroom.server.http.streams import event
from greenroom.server.page.broadcast import BYTES_PER_S, FRAME_S
from greenroom.server.page.frames import (
    LevelSlices,
    flags_text,
    states_text,
)

GRIDS = (8, 32), (48, 128), (61, 256), (61, 384)
PAUSE_S = 1.0  # between two intervals
PROMPT = {"prompt": "Once upon a time", "max_tokens": 1500, "temperature": 0.8, "seed": 1}


class Page(threading.Thread):
    """Reads the stream of frames as a page does, and counts its bytes and frames."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._response = urllib.request.urlopen(f"{url}/v1/live", timeout=60)
        self.nbytes = self.largest = 0
        self.on = True
        self.start()

    def run(self) -> None:
        while self.on and (line := self._response.readline()):
            self.nbytes += len(line)
            self.largest = max(self.largest, len(line))
        self._response.close()


@contextmanager
def served(model: str, options: list[str]) -> Iterator[tuple[int, str]]:
    """A server as a process, and its URL."""
    command = [sys.executable, "-m", "greenroom", "serve", model, "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = ""
        for line in process.stderr:
            if " answers once " in line:
                url = line.split()[1]
            if line.startswith("try: "):
                break
        else:
            sys.exit(f"the server ended with code {process.wait()}")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            yield process.pid, url
        finally:
            process.terminate()


class Load(threading.Thread):
    """Asks for one answer after another while `on`."""

    def __init__(self, url: str, model: str) -> None:
        super().__init__(daemon=True)
        self._url, self._body = url, {**PROMPT, "model": model}
        self.on = True
        self.start()

    def run(self) -> None:
        headers = {"content-type": "application/json"}
        while self.on:
            body = json.dumps(self._body).encode()
            request = urllib.request.Request(f"{self._url}/v1/completions", body, headers)
            with urllib.request.urlopen(request, timeout=600) as response:
                response.read()


def cpu_percent(pid: int, seconds: float) -> tuple[float, float]:
    """Measure the processor time of a process and of its first thread, in percent of one core."""

    def spent() -> tuple[int, int]:
        tasks = {task.name: task / "schedstat" for task in Path(f"/proc/{pid}/task").iterdir()}
        times = {name: int(file.read_text().split()[0]) for name, file in tasks.items()}
        return sum(times.values()), times[str(pid)]

    begin, before = time.perf_counter_ns(), spent()
    time.sleep(seconds)
    after, took = spent(), time.perf_counter_ns() - begin
    whole, loop = (100 * (b - a) / took for a, b in zip(before, after, strict=True))
    return whole, loop


def measure(args: argparse.Namespace, pid: int, url: str, what: str) -> list[str]:
    """Measure intervals without and with a page in turn; return a row of the table."""
    without, with_page, rates, sizes = [], [], [], []
    for _ in range(args.rounds):
        without.append(cpu_percent(pid, args.seconds))
        page = Page(url)
        time.sleep(PAUSE_S)
        nbytes, begin = page.nbytes, time.perf_counter()
        with_page.append(cpu_percent(pid, args.seconds))
        rates.append((page.nbytes - nbytes) / (time.perf_counter() - begin))
        sizes.append(page.largest)
        page.on = False
        page.join()
        time.sleep(PAUSE_S)
        note(f"{what}: loop {without[-1][1]:.2f} % without, {with_page[-1][1]:.2f} % with a page")
    whole, before = (statistics.mean(each) for each in zip(*without, strict=True))
    _, after = (statistics.mean(each) for each in zip(*with_page, strict=True))
    return [
        what, f"{whole:.1f}", f"{before:.2f}", f"{after:.2f}", f"{after - before:+.2f}",
        f"{statistics.mean(rates) / 1e3:.1f}", f"{max(sizes) / 1e3:.1f}",
    ]  # fmt: skip


def frame_row(layers: int, experts: int) -> list[str]:
    """Measure the maps and layers of a frame for a grid of layers and experts."""
    random, count = np.random.default_rng(0), layers * experts
    offsets = np.arange(0, count + 1, experts)
    uses = random.integers(0, 10**5, count)
    states = random.integers(0, len(ExpertState), count)
    slices = LevelSlices(offsets)
    requests: Any = [["req_0123456789abcdef", "answer", 999, 999, 99, 999, 9.9]] * 8

    def frame() -> bytes:
        hits = by_layer(uses, offsets)
        return event({
            "t": 12345.678, "requests": requests, "hits": hits, "misses": hits,
            "stalls": hits, "states": states_text(states), "used": flags_text(states > 1),
            "levels": slices.encode(uses),
        })  # fmt: skip

    size, repeats = max(len(frame()) for _ in range(8)), 200
    begin = time.process_time()
    for _ in range(repeats):
        frame()
    took = (time.process_time() - begin) / repeats
    every = max(FRAME_S, size / BYTES_PER_S)
    return [
        f"{layers} x {experts}", f"{size / 1e3:.1f}", f"{1 / every:.1f}",
        f"{size / every / 1e3:.1f}", f"{1e3 * took:.2f}", f"{100 * took / every:.2f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="what the live page costs")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--cache", default="25%")
    parser.add_argument("--seconds", type=float, default=10.0, help="of an interval")
    parser.add_argument("--rounds", type=int, default=4, help="pairs of intervals")
    args = parser.parse_args()
    print(f"{machine()}, {commit()}\n")
    with served(args.model, ["--cache", args.cache]) as (pid, url):
        time.sleep(3 * PAUSE_S)
        rows = [measure(args, pid, url, "idle")]
        load = Load(url, args.model.rstrip("/").rpartition("/")[2])
        time.sleep(3 * PAUSE_S)
        rows.append(measure(args, pid, url, "generating"))
        load.on = False
    head = ("server", "cpu", "loop without", "loop with", "page", "kB/s", "largest frame kB")
    print(table(head, rows))
    head = ("layers x experts", "frame kB", "frames/s", "kB/s", "ms a frame", "cpu")
    print("\n" + table(head, [frame_row(*grid) for grid in GRIDS]))


if __name__ == "__main__":
    main()
