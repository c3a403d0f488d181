"""Compare two versions of Greenroom in turns: ratio of their CPU seconds.

    git worktree add /tmp/before COMMIT
    python benchmarks/versions.py /tmp/before/src src decode bench-data/moe1.7b-zipf1.0 --cache 50%
    python benchmarks/versions.py /tmp/before/src src serve bench-data/moe1.7b-zipf1.0 --cache 50%
    python benchmarks/versions.py /tmp/before/src src command simulate TRACE --policy lru

Each version is a process that loads once. In a turn both do the same work, one after the other, and
who is first changes from turn to turn. Turns end when the 95 % interval of the ratio is at most
--half-width to either side, or after --turns. CPU seconds are those of all threads of the process:
other programs disturb them less than they disturb time.

  decode    a new prompt, then --tokens tokens, which are timed; logits must be the same
  serve     `greenroom serve`: --users completions of --tokens tokens each at once; of what comes
            out only the number of tokens is compared
  command   any command of greenroom, in a process that has run it before; compared as printed
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import commit, machine, note, ratio, show_ratio, table

PROMPT = 16  # tokens
LEAST_TURNS = 10
Turn = Callable[[], tuple[float, str]]  # CPU seconds a token or a command, and what came out


def decode(args: argparse.Namespace) -> Turn:
    import greenroom  # isort: skip  # before torch: it sets how OpenMP's threads wait
    import torch
    from worker import Passes, fill

    sys.path.remove(str(Path(__file__).parent))  # whose kernels.py is no package of that name
    torch.set_num_threads(args.threads)
    model, _ = greenroom.load(args.what[0], cache=args.cache)
    passes = Passes(model)
    fill(passes)

    def turn() -> tuple[float, str]:
        passes.prefill(PROMPT)
        begin = time.process_time()
        passes.decode(args.tokens)
        used = time.process_time() - begin
        with torch.no_grad():
            logits = model(torch.tensor([[3, 4, 5]])).logits
        return used / args.tokens, hashlib.sha256(logits.float().numpy().tobytes()).hexdigest()

    return turn


def command(args: argparse.Namespace) -> Turn:
    from greenroom.cli import main

    def turn() -> tuple[float, str]:
        out, begin = io.StringIO(), time.process_time()
        with contextlib.redirect_stdout(out):
            code = main(args.what)
        assert not code, code
        return time.process_time() - begin, out.getvalue()

    return turn


def serve(args: argparse.Namespace) -> Turn:
    import httpx2
    import psutil

    server = [sys.executable, "-m", "greenroom", "serve", args.what[0], "--port", "0"]
    options = ["--cache", args.cache, "--max-batch", str(args.users), "--context", "512"]
    process = subprocess.Popen([*server, *options], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    url = next(both_versions[0] for line in process.stderr
               if (both_versions := re.search(r"http://[\w.:]+", line)))  # fmt: skip
    threads = ThreadPoolExecutor(args.users)
    threads.submit(process.stderr.read)  # what else it says
    watched, turns_asked = psutil.Process(process.pid), 0
    while httpx2.get(f"{url}/health").json()["status"] != "ready":
        time.sleep(0.1)

    def ask(number: int) -> int:
        prompt = [5 + (number * 31 + i * 7) % 380 for i in range(PROMPT)]
        body = {"model": httpx2.get(f"{url}/v1/models").json()["data"][0]["id"], "prompt": prompt,
                "max_tokens": args.tokens, "temperature": 0}  # fmt: skip
        answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=600).json()
        assert "usage" in answer, answer
        return int(answer["usage"]["completion_tokens"])

    def turn() -> tuple[float, str]:
        nonlocal turns_asked
        begin = sum(watched.cpu_times()[:2])
        tokens = sum(threads.map(ask, range(turns_asked, turns_asked + args.users)))
        turns_asked += args.users
        return (sum(watched.cpu_times()[:2]) - begin) / tokens, str(tokens)

    return turn


KINDS: dict[str, Callable[[argparse.Namespace], Turn]] = {
    "decode": decode, "serve": serve, "command": command,
}  # fmt: skip


def worker(args: argparse.Namespace) -> None:
    """Do a turn for each line of standard input, and print its result as JSON."""
    turn = KINDS[args.kind](args)
    try:
        for _ in sys.stdin:
            print("turn " + json.dumps(turn()), flush=True)
    finally:
        if args.kind == "serve":
            import psutil

            for child in psutil.Process().children():
                child.terminate()


class Version:
    """A process that runs the source of one checkout."""

    def __init__(self, source: Path) -> None:
        assert (source / "greenroom").is_dir(), f"{source} has no package greenroom"
        self._source = source
        environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--worker"],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def turn(self) -> tuple[float, str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("turn "):
                used, out = json.loads(line.removeprefix("turn "))
                return used, out
        raise SystemExit(f"{self._source}: ended with exit code {self._process.wait()}")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def versions(*sources: Path) -> Iterator[list[Version]]:
    both_versions = [Version(each) for each in sources]
    try:
        yield both_versions
    finally:
        for each in both_versions:
            each.end()


def compare(args: argparse.Namespace) -> None:
    print(f"commit {commit()}; {machine()}\n")
    pairs: list[tuple[float, float]] = []
    same = True
    with versions(args.before, args.after) as both:
        for each in both:  # the first turn compiles, and fills the cache
            each.turn()
        while len(pairs) < args.turns:
            order = (0, 1) if len(pairs) % 2 == 0 else (1, 0)
            turns: dict[int, Any] = {which: both[which].turn() for which in order}
            pairs.append((turns[0][0], turns[1][0]))
            same &= turns[0][1] == turns[1][1]
            note(f"{len(pairs)}: {pairs[-1][0]:.4f} s, {pairs[-1][1]:.4f} s; {show_ratio(pairs)}")
            _, low, high = ratio(pairs)
            if len(pairs) >= LEAST_TURNS and (high - low) / 2 <= args.half_width:
                break
    work = " ".join([args.kind, *args.what, *(["--cache", args.cache] * (args.kind != "command"))])
    least = [f"{min(column):.4f}" for column in zip(*pairs, strict=True)]
    print(table(
        ("work", "turns", "before, s", "after, s", "before / after", "same output"),
        [(work, len(pairs), *least, show_ratio(pairs), "yes" if same else "no")],
    ))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="the folder `src` of a checkout")
    parser.add_argument("after", type=Path)
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("what", nargs="+", help="a model, or a command with its options")
    parser.add_argument("--cache", default="100%")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--half-width", type=float, default=0.02)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args, work_arguments = parser.parse_known_args()
    if work_arguments and args.kind != "command":
        parser.error(f"unrecognized arguments: {' '.join(work_arguments)}")
    args.what += work_arguments
    if args.worker:
        worker(args)
    else:
        compare(args)


if __name__ == "__main__":
    main()
