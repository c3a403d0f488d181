"""Decode beside a busy loop: Greenroom, two engines that never wait for one another, llama.cpp.

    python benchmarks/shared_cores.py bench-data/moe1.7b-zipf1.5-Q4_K_M.gguf [--llama-bench PATH]

Everything is resident. Each round measures every engine twice, quiet and beside `--loops` processes
that run `while True: pass` at the same priority, in turns; ratios are over pairs of one round.

greenroom:   one process with --threads threads, which share each token's work
independent: --threads processes of one thread, each of which decodes tokens of its own. Nobody
             waits for anybody, so the sum of their rates shows what the cores have to give
llama.cpp:   llama-bench with --threads threads, a process for each measurement

*Share* is an engine's rate beside the loops over its quiet rate.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from common import commit, machine, note, run_llama_bench, show_ratio, table

Rates = dict[str, list[tuple[float, float]]]  # by engine: tokens/s (quiet, busy) of each round
SETTLE = 0.3  # seconds from the start of the loops to a measurement


def load(path: str, threads: int) -> Any:
    """Load a model; greenroom is imported before torch, for which it sets how long threads spin."""
    import greenroom

    return greenroom.load(path, cache="100%", threads=threads)[0]


def decode(path: str, threads: int) -> None:
    """Decode tokens; standard input has the seconds of each measurement, output the rates."""
    model = load(path, threads)
    import torch
    from worker import Passes, fill

    with torch.no_grad():
        passes = Passes(model)
        fill(passes)
        for limit in map(float, sys.stdin):
            passes.prefill(8)
            passes.decode(2)
            tokens, start = 0, time.perf_counter()
            while not tokens or time.perf_counter() - start < limit:
                passes.decode(1)
                tokens += 1
            print(tokens / (time.perf_counter() - start), flush=True)


class Engine:
    """Processes that decode at the same time, each with a share of the threads."""

    def __init__(self, path: Path, processes: int, threads: int) -> None:
        command = [sys.executable, __file__, str(path), "--decode", "--threads", str(threads)]
        self._processes = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True,
            )
            for _ in range(processes)
        ]  # fmt: skip
        self.rate(0)  # everything is loaded

    def rate(self, seconds: float) -> float:
        """Decode for some seconds; return tokens/s, the sum of all processes."""
        for process in self._processes:
            assert process.stdin
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        return sum(float(p.stdout.readline()) for p in self._processes if p.stdout)

    def close(self) -> None:
        for process in self._processes:
            process.communicate()


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Context in which some processes use a core each, as far as they get one."""
    loop = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(loop) for _ in range(count)]
    try:
        time.sleep(SETTLE if count else 0)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def llama_rate(args: argparse.Namespace) -> float:
    result = run_llama_bench(
        args.llama_bench, args.model, threads=args.threads, prompt=0, tokens=args.peer_tokens,
        repeats=2,
    )  # fmt: skip
    if "error" in result:
        raise SystemExit(f"llama-bench: {result['error']}")
    return len(result["token_s"]) / sum(result["token_s"])


def measure(args: argparse.Namespace) -> Rates:
    rates: Rates = defaultdict(list)
    with ExitStack() as stack:
        engines: dict[str, Callable[[], float]] = {}
        for name, processes in (("greenroom", 1), ("independent", args.threads)):
            engine = Engine(args.model, processes, args.threads // processes)
            stack.callback(engine.close)
            engines[name] = lambda engine=engine: engine.rate(args.seconds)
        if args.llama_bench:
            engines["llama.cpp"] = lambda: llama_rate(args)
        for number in range(args.rounds):
            turn = number % len(engines)
            names = list(engines)
            for name in names[turn:] + names[:turn]:
                by_loops = {}
                for loops in (0, args.loops) if number % 2 else (args.loops, 0):
                    with busy_loops(loops):
                        by_loops[loops] = engines[name]()
                quiet, busy = by_loops[0], by_loops[args.loops]
                rates[name].append((quiet, busy))
                note(f"{number + 1}/{args.rounds} {name}: {quiet:.1f}, busy {busy:.1f} tokens/s")
    return rates


def report(rates: Rates) -> str:
    rows = []
    shares = {name: [busy / quiet for quiet, busy in each] for name, each in rates.items()}
    for name, each in rates.items():
        quiet, busy = (sorted(column)[len(each) // 2] for column in zip(*each, strict=True))
        others = [
            show_ratio(list(zip(shares["greenroom"], shares[name], strict=True))),
            show_ratio([(a, b) for (_, a), (_, b) in zip(rates["greenroom"], each, strict=True)]),
        ]
        share = show_ratio([(b, a) for a, b in each])
        rows.append((name, f"{quiet:.3g}", f"{busy:.3g}", share, *others))
    return table(
        ("engine", "quiet, tokens/s", "busy, tokens/s", "share", "greenroom's share / its share",
         "greenroom's busy / its busy"),
        rows,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="decode beside busy loops")
    parser.add_argument("model", type=Path, help="a GGUF file, or for Greenroom alone any other")
    parser.add_argument("--loops", type=int, default=1, help="busy loops (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=2, help="of a measurement of Greenroom")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's llama-bench, if you have it")
    parser.add_argument(
        "--peer-tokens", type=int, default=64, help="of a repetition of llama-bench"
    )
    parser.add_argument("--decode", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.decode:
        decode(str(args.model), args.threads)
        return
    load = f"{args.loops} busy loop{'s' * (args.loops > 1)}"
    print(f"commit {commit()}; {machine()}; {args.model.name}, {args.threads} threads, {load}\n")
    print(report(measure(args)))


if __name__ == "__main__":
    main()
