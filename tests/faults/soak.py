"""A server for a long time, while operations on the files below it fail: `make soak`.

    python -m tests.faults.soak --minutes 60

`greenroom serve` runs the demo model with a prompt cache, in a process with the layer of shim.cpp.
Clients of all APIs (those of benchmarks/load.py) ask questions whose answers are known. Now and
then an operation on the checkpoint or the prompt cache fails, or the system refuses memory or a
thread. Every answer must be right, or end with one clear error; none may hang. The server stays
ready, and has in the end no more memory, threads and descriptors than before. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import psutil

from tests.counts import add_all
from tests.faults.shim import KINDS, build

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
DEMO = ROOT / "models" / "demo"
# The files of prompts are fewer than the questions, so that they are written again and again.
OPTIONS = ("--model-name", "demo", "--cache", "25%", "--batch-invariant", "--max-batch", "4",
           "--threads", "1", "--prompt-cache-size", "3MB", "--prefix-share", "10%")  # fmt: skip
CLEAR = (
    "the server could not read a part of the model: try again",
    "the server's device ran out of memory, or a copy failed: try again",
    "the queue is full",
)
# Kinds of faults; the demo model has no checksums, so wrong bytes in it are not noticed.
CHOSEN = tuple(name for name in KINDS if name != "wrong")
# Operations until a fault, at most: those that are rare come soon.
FARTHEST = {"thread": 1, "memory": 30, "ENOSPC": 10, "EMFILE": 10}
FAR = 300
GROWTH, JUDGED_S = 1.02, 240.0  # of memory, in runs long enough for it
FINE = " 200 · "  # in the log's line of a request
SAMPLE_S, STOP_S = 1.0, 60.0


@dataclass
class Server:
    """The process, what failed in it, and samples of what it holds."""

    process: subprocess.Popen[str]
    url: str
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    samples: list[tuple[int, int, int]] = field(default_factory=list)
    asked: str = ""

    def fail(self, kind: str, number: int) -> None:
        """Let an operation fail from now on; count what the fault before it did."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{kind} {number}\n")
        self.process.stdin.flush()
        operation = self.process.stdout.readline().strip()
        if operation != "none":
            self.faults[self.asked, operation] += 1
        self.asked = kind

    def sample(self) -> None:
        process = psutil.Process(self.process.pid)
        held = process.memory_info().rss, process.num_threads(), process.num_fds()
        self.samples.append(held)

    def growth(self) -> tuple[float, int, int]:
        """Memory of the last quarter over that of the second, and further threads and files."""
        quarter = len(self.samples) // 4
        parts = self.samples[quarter : 2 * quarter], self.samples[-quarter:]
        before, after = ([*map(statistics.median, zip(*each, strict=True))] for each in parts)
        return after[0] / before[0], int(after[1] - before[1]), int(after[2] - before[2])


@contextmanager
def serving(root: Path, log: Path) -> Iterator[Server]:
    """A server that is ready; SIGTERM must end it with exit code 0."""
    shutil.copytree(DEMO, root / "model")
    command = [sys.executable, "-m", "tests.faults.server", root, "serve", root / "model", *OPTIONS,
               "--port", "0", "--prompt-cache", root / "prompts"]  # fmt: skip
    environment = {**os.environ, "LD_PRELOAD": str(build())}
    pipe = subprocess.PIPE
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, stderr=errors, text=True
        )
    try:
        while "try: " not in (text := log.read_text()):
            assert process.poll() is None, text
            time.sleep(0.1)
        url = next(word for word in text.split() if word.startswith("http://"))
        yield Server(process, url)
        process.terminate()
        assert process.wait(STOP_S) == 0, log.read_text()[-3000:]
    finally:
        process.kill()
        process.wait()


def spoil(server: Server, rng: Random, every_s: float, seconds: float) -> None:
    """Let operations fail, and sample what the server holds, until the time is over."""
    until = time.monotonic() + seconds
    after = time.monotonic()
    while time.monotonic() < until and server.process.poll() is None:
        if time.monotonic() >= after:
            kind = rng.choice(CHOSEN)
            server.fail(kind, rng.randint(1, FARTHEST.get(kind, FAR)))
            after += rng.uniform(0.2, 1.8) * every_s
        server.sample()
        time.sleep(min(SAMPLE_S, every_s / 2))
    server.fail("EIO", 0)


def load_clients() -> Any:
    """The module benchmarks/load.py."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import load
    finally:
        sys.path.remove(str(BENCHMARKS))
    return load


def is_clear(reply: Any) -> bool:
    """Check that an error is one that a client may get when an operation fails."""
    return reply.status in (200, 429, 500) and reply.error.startswith(CLEAR)


def run(args: argparse.Namespace, server: Server) -> list[str]:
    """Ask, spoil, and ask once more; what was wrong."""
    clients, seconds = load_clients(), args.minutes * 60
    load = clients.Load(server.url, clients.questions(args.seed), args.seed, is_clear)
    rng = Random(args.seed)
    asyncio.run(load.run(args.clients, seconds, lambda s: spoil(server, rng, args.every, s)))
    wrong: list[str] = load.wrong
    ready = httpx2.get(f"{server.url}/health", timeout=STOP_S).json()
    wrong += [f"the server is {ready}"] if ready != {"status": "ready"} else []
    for outcome, count in load.outcomes.most_common():
        print(f"{count} answers: {outcome}")
    for (kind, operation), count in sorted(server.faults.items()):
        print(f"{count} faults: {kind} in {operation}")
    memory, threads, files = server.growth()
    print(f"last quarter against second: memory x {memory:.3f}, threads {threads:+d},"
          f" descriptors {files:+d}; {server.samples[-1]}")  # fmt: skip
    if seconds >= JUDGED_S and memory > GROWTH:
        wrong.append(f"memory has grown by {memory - 1:.1%}")
    wrong += [f"{threads} more threads"] if threads > 0 else []
    wrong += [f"{files} more descriptors"] if files > 0 else []
    complete = load.outcomes["complete"]
    refused = sum(n for outcome, n in load.outcomes.items() if outcome[0].isdigit())
    add_all({"server/faults": server.faults.total(), "server/answers right": complete,
             "server/answers refused": refused})  # fmt: skip
    return wrong


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--every", type=float, default=1.0, help="mean seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    with TemporaryDirectory(prefix="faults-") as folder:
        root, log = Path(folder) / "root", Path(folder) / "log"
        root.mkdir()
        with serving(root, log) as server:
            wrong = run(args, server)
        if wrong:
            failed = [line for line in log.read_text().splitlines() if FINE not in line]
            print("\n".join(failed[-100:]), file=sys.stderr)
    print(f"{len(wrong)} wrong: {'; '.join(wrong[:5])}" if wrong else "none wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
