"""Serve miniatures in memory cgroups: are the promises of `--memory` kept?

    python -m tests.memory.run --requests 10000                 # of all models together
    python -m tests.memory.run kimi-k2 --forms gguf --requests 500

Each model of benchmarks/shapes.py, with small matrices, few layers and a quarter of a gigabyte of
experts, is served by a process in a cgroup whose limit is its `--memory`: the least that the
server accepts. Clients send requests in rounds: prompts of several lengths, some with a common
prefix, as many at a time as are computed together. After each round the memory is read. A model
fails if

  - the kernel ends a process of the cgroup, or the server refuses or changes an answer: all
    bits of its log-probabilities are compared with those of a server without limits that
    computes one request at a time;
  - the process ever has more resident memory than `--memory`;
  - after WARM_UP of the rounds, the resident memory, or that of the cgroup, grows by 1 %: by a
    straight line through the readings, since single ones differ by as much.

Counts add up in the file of tests/counts.py.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tests import conftest  # noqa: F401  the settings of all tests
from tests.counts import add_all, totals
from tests.memory.server import BENCHMARKS, CgroupError, Memory, least_memory, serving

SHAPES = ("qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "gpt-oss-120b", "deepseek-v2-lite",
          "glm-4.5-air", "kimi-k2")  # fmt: skip
FORMS = ("gguf", "safetensors")
LAYERS, VOCABULARY = 6, 1024
EXPERTS_BYTES = 250 << 20
VALUES = 3 * 512 * 256  # of an expert
LENGTHS = (1, 4, 20, 60, 240)
ROUND, CLIENTS = 20, 4
WARM_UP, DRIFT = 0.2, 0.01
OPTIONS = ("--context", "512", "--batch-invariant", "--threads", "2", "--no-page", "--model-name",
           "miniature")  # fmt: skip
MIB = 1 << 20

Body = dict[str, Any]


@dataclass(frozen=True)
class Found:
    """What one model's requests showed; `growth` is a share of the memory of the first rounds."""

    requests: int
    limit: int
    peak: int
    rss_growth: float
    usage_growth: float
    wrong: tuple[str, ...]

    @property
    def failures(self) -> list[str]:
        """The promises that were broken."""
        found = [*self.wrong]
        if self.peak > self.limit:
            found.append(f"{self.peak / MIB:.1f} MiB of --memory {self.limit / MIB:.0f} MiB")
        for name, growth in (("process", self.rss_growth), ("cgroup", self.usage_growth)):
            if growth >= DRIFT:
                found.append(f"the memory of the {name} grew by {growth:.2%}")
        return found


def write(shape: str, form: str, folder: Path) -> Path:
    """Write a miniature; its path."""
    bits = 16 if form == "safetensors" and not shape.startswith("gpt-oss") else 4.5
    experts = int(EXPERTS_BYTES / (LAYERS * VALUES * bits / 8))
    model = folder / (f"{shape}.gguf" if form == "gguf" else shape)
    command = [sys.executable, str(BENCHMARKS / "shapes.py"), shape, str(model), "--tiny",
               "--format", form, "--layers", str(LAYERS), "--vocabulary", str(VOCABULARY),
               "--experts", str(experts), "--noise", "0.5"]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return model


def requests(random: Random) -> list[Body]:
    """The requests of a round."""
    common = [random.randrange(VOCABULARY - 8) for _ in range(max(LENGTHS))]
    made: list[Body] = []
    for number in range(ROUND):
        length = LENGTHS[number % len(LENGTHS)]
        own = [random.randrange(VOCABULARY - 8) for _ in range(length)]
        prompt = own if random.random() < 0.5 else common[: length - 1] + own[:1]
        made.append({
            "model": "miniature", "prompt": prompt, "max_tokens": random.choice((1, 3, 6)),
            "temperature": random.choice((0, 0.8)), "seed": number, "logprobs": 1,
        })  # fmt: skip
    return made


def answers(model: Path, bodies: Sequence[Body]) -> list[Any]:
    """Each request's answer without limits, computed alone."""
    alone = ("--cache", "100%", "--max-batch", "1", "--no-prefix-reuse")
    with serving(model, *alone, *OPTIONS) as server:
        return [server.ask(body) for body in bodies]


def growth(sizes: Sequence[int]) -> float:
    """By what share a straight line through the sizes after the warm-up rises."""
    settled = sizes[int(len(sizes) * WARM_UP) :]
    if len(settled) < 2:
        return 0.0
    slope, first = np.polyfit(range(len(settled)), settled, 1)
    return float(slope * (len(settled) - 1) / first)


def check(
    model: Path, limit: int, bodies: Sequence[Body], expected: Sequence[Any], rounds: int,
    random: Random,
) -> Found:  # fmt: skip
    """Send requests to a server in a cgroup of `limit` bytes."""
    wrong: list[str] = []
    readings: list[Memory] = []

    def ask(number: int) -> None:
        try:
            answer = server.ask(bodies[number])
        except (AssertionError, OSError) as error:
            wrong.append(f"request {number}: {error}")
        else:
            if answer != expected[number]:
                wrong.append(f"request {number}: {answer}, not {expected[number]}")

    options = ("--memory", str(limit), "--max-batch", str(CLIENTS), *OPTIONS)
    with serving(model, *options, limit=limit) as server, ThreadPoolExecutor(CLIENTS) as clients:
        for _ in range(rounds):
            order = random.sample(range(len(bodies)), len(bodies))
            list(clients.map(ask, order))
            if server.kills():
                wrong.insert(0, "the kernel has ended the server for want of memory")
            if wrong:
                break
            readings.append(server.memory())
    rss, usage = [each.rss for each in readings], [each.usage for each in readings]
    peak = max((max(each.peak, each.rss) for each in readings), default=0)
    return Found(
        len(readings) * len(bodies), limit, peak, growth(rss), growth(usage), tuple(wrong[:3])
    )


def run(shape: str, form: str, count: int, seed: int) -> Found:
    """Send so many requests, rounded up to whole rounds, to a miniature of one model."""
    with TemporaryDirectory(prefix="memory-") as folder:
        model = write(shape, form, Path(folder))
        random = Random(seed)
        bodies = requests(random)
        least = least_memory(model, "--max-batch", str(CLIENTS), *OPTIONS)
        expected = answers(model, bodies)
        return check(model, least, bodies, expected, -(-count // ROUND), random)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shapes", nargs="*", default=SHAPES, metavar="MODEL")
    parser.add_argument("--forms", nargs="+", default=FORMS, choices=FORMS)
    parser.add_argument("--requests", type=int, default=2000, help="of all models together")
    parser.add_argument("--seed", type=int, help="of the requests; those are not counted")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also then servers are ended
    cases = [(shape, form) for shape in args.shapes for form in args.forms]
    failed = 0
    for shape, form in cases:
        name, begin = f"memory/{shape} {form}", time.monotonic()
        seed = totals().get(f"{name} requests", 0) if args.seed is None else args.seed
        try:
            found = run(shape, form, -(-args.requests // len(cases)), seed)
        except CgroupError as error:
            print(error, file=sys.stderr)
            return 2
        if args.seed is None:
            add_all({f"{name} requests": found.requests})
        failed += bool(found.failures)
        print(f"{shape} {form}: {found.requests} requests, --memory {found.limit / MIB:.0f} MiB,"
              f" peak {found.peak / found.limit:.1%}, growth {found.rss_growth:+.2%}, cgroup"
              f" {found.usage_growth:+.2%}, {'; '.join(found.failures) or 'kept'},"
              f" {time.monotonic() - begin:.0f} s", flush=True)  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
