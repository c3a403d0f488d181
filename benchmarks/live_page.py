"""Cost of the live page: bytes a second, and processor time with and without a page that watches.

    python benchmarks/live_page.py [--model demo] [--cache 25%] [--seconds 10] [--rounds 4]
    python benchmarks/live_page.py --frames

Starts `greenroom serve`, and measures intervals in turn: without a page and with one, while the
server is idle and while it generates. Frames are made and sent in the thread of the event loop, so
the difference of its processor time is what a page costs. Processor time is in percent of one core.

The second table is of frames alone (`EngineFrames.frame`), without a server, for shapes of models:
a scheduler of that shape with a quarter of its experts in memory, prefetching on, 24 requests in
the frame, and every expert used since the last one. `--frames` measures this table only.
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
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from common import commit, machine, note, table

from greenroom.config import ServeConfig
from greenroom.core.cache.state import preload
from greenroom.core.pieces import Pieces
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.policies import policy
from greenroom.runtime.driver.meter import LinkMeter
from greenroom.server.http.streams import event
from greenroom.server.page.broadcast import BYTES_PER_S, FRAME_S
from greenroom.server.page.live import EngineFrames

SHAPES = (8, 32), (48, 128), (94, 128), (61, 256), (61, 384)
SERVER_HEAD = (
    "server", "cpu", "loop without", "loop with", "page", "kB/s", "largest frame kB",
)  # fmt: skip
FRAMES_HEAD = (
    "layers x experts", "frame kB", "frames/s", "kB/s", "ms a frame", "cpu", "cpu at 2 frames/s",
)  # fmt: skip
TOP_K, REPEATS = 8, 400
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


class StubEngine:
    """An engine without a model; its scheduler and counters have a given shape."""

    def __init__(self, layers: int, experts: int) -> None:
        self._random, count = np.random.default_rng(0), layers * experts
        pieces = Pieces.unsplit(range(0, count + 1, experts), [1] * layers)
        scheduler = Scheduler(pieces, count // 4, policy("lru"), ahead=4 * TOP_K)
        resident = self._random.permutation(count)[: count // 4]
        preload(scheduler.placement.cache.state, resident)
        link = LinkMeter(nbytes=10**13, busy_s=98765.4321)
        guard = SimpleNamespace(verdict="prefetching on: tokens took 15 % less time with it")
        self.driver = SimpleNamespace(
            pieces=pieces,
            request_counts=self._random.integers(10**3, 10**5, count),
            miss_counts=self._random.integers(10**5, 10**7, layers),
            meter=SimpleNamespace(layer_stalls=[12345.678] * layers, links=[link]),
            predictions=SimpleNamespace(foresight=SimpleNamespace(on=True), guard=guard),
            scheduler=scheduler,
        )
        need = SimpleNamespace(staging=10**9, workspace=10**9)
        self.greenroom = SimpleNamespace(
            driver=self.driver, capacity=count // 4, devices=[],
            slot_budget=SimpleNamespace(first_block_needs=lambda: need),
            setup=SimpleNamespace(cuda=False, budget_bytes=10**11,
                                  catalog=SimpleNamespace(slot_bytes=10**7)),
        )  # fmt: skip
        self.admission = SimpleNamespace(reserved=10**9, prefixes=SimpleNamespace(nbytes=10**9))
        self.model, self.was_ready = torch.nn.Module(), True
        self.config = ServeConfig()
        self.totals = SimpleNamespace(prompt_tokens=10**9, new_tokens=10**9, recent=[])

    def use_all(self) -> None:
        """Count a request for every expert."""
        self.driver.request_counts += 1

    def state(self) -> tuple[str, float, str]:
        return "ready", 1.0, ""

    def sequences(self) -> tuple[list[Any], list[Any]]:
        request = SimpleNamespace(name="req_0123456789abcdef", max_new_tokens=9999)
        one = SimpleNamespace(request=request, admitted=1.0, answered=1.0, arrived=0.5,
                              prompt=9999, computed=9999, new=999)  # fmt: skip
        return [one] * 8, [one] * 64


def frame_row(layers: int, experts: int) -> list[str]:
    """Measure frames of an engine of a shape: bytes and processor time."""
    engine = StubEngine(layers, experts)
    source = EngineFrames(engine, "large", controls=False)  # type: ignore[arg-type]

    def frame() -> bytes:
        engine.use_all()
        return event(source.frame())

    size, times = max(len(frame()) for _ in range(16)), []
    for _ in range(REPEATS):
        begin = time.process_time()
        frame()
        times.append(time.process_time() - begin)
    took, every = statistics.median(times), max(FRAME_S, size / BYTES_PER_S)
    return [
        f"{layers} x {experts}", f"{size / 1e3:.1f}", f"{1 / every:.1f}",
        f"{size / every / 1e3:.1f}", f"{1e3 * took:.2f}", f"{100 * took / every:.2f}",
        f"{100 * took / FRAME_S:.2f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="what the live page costs")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--cache", default="25%")
    parser.add_argument("--seconds", type=float, default=10.0, help="of an interval")
    parser.add_argument("--rounds", type=int, default=4, help="pairs of intervals")
    parser.add_argument("--frames", action="store_true", help="only the second table")
    args = parser.parse_args()
    print(f"{machine()}, {commit()}\n")
    if not args.frames:
        print(table(SERVER_HEAD, server_rows(args)) + "\n")
    print(table(FRAMES_HEAD, [frame_row(*shape) for shape in SHAPES]))


def server_rows(args: argparse.Namespace) -> list[list[str]]:
    """Measure a server, idle and while it generates."""
    with served(args.model, ["--cache", args.cache]) as (pid, url):
        time.sleep(3 * PAUSE_S)
        rows = [measure(args, pid, url, "idle")]
        load = Load(url, args.model.rstrip("/").rpartition("/")[2])
        time.sleep(3 * PAUSE_S)
        rows.append(measure(args, pid, url, "generating"))
        load.on = False
    return rows


if __name__ == "__main__":
    main()
