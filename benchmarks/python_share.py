"""Share of a token's time that is Python: neither in a kernel nor waiting for experts.

    python benchmarks/python_share.py bench-data/qwen3-30b.gguf --memory 8GiB
    python benchmarks/python_share.py MODEL --cache 25% --profile
    python benchmarks/python_share.py MODEL --cache 100%      # everything resident

Clocks around every kernel call (`KernelEntry`), and the driver's own clock of stalls. What is left
of a decode pass is Python, with torch's operations between kernels and what other threads take by
holding Python's lock. The thread that computes is timed, no other.

    kernels    in kernel calls, the start of their parallel regions included
    waiting    for experts that are not in memory
    Python     the rest of the pass
    share      of Python in the pass: the median of passes
    CPU ms     CPU time of this thread outside of kernels: where other processes take the cores, it
               says more than the rest of the pass, which has the time without a core, too
    us a layer CPU time over the layers with experts
    calls      of kernels in a pass

All are medians of passes. The clocks themselves count as Python: about 0.5 us a call.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# isort: off
import greenroom  # before torch, for the threads of OpenMP
import torch

# isort: on
from common import commit, machine, table
from worker import Passes, fill

from greenroom.runtime.kernels.launch.openmp import KernelEntry

COLUMNS = ("model", "slots", "hits", "ms a token", "kernels", "waiting", "Python", "share",
           "CPU ms", "us a layer", "calls")  # fmt: skip


@dataclass
class KernelClock:
    """Seconds, CPU seconds and number of this thread's kernel calls."""

    seconds: float = 0.0
    cpu: float = 0.0
    calls: int = 0

    def install(self) -> None:
        """Put a clock around the calls of all kernels, from now on."""
        call, now, cpu = KernelEntry.__call__, time.perf_counter, time.thread_time
        thread = threading.get_ident()

        def timed(entry: KernelEntry, argument: int, wide: bool = True) -> None:
            if threading.get_ident() != thread:
                return call(entry, argument, wide)
            start, begin = now(), cpu()
            call(entry, argument, wide)
            self.cpu += cpu() - begin
            self.seconds += now() - start
            self.calls += 1
            return None

        KernelEntry.__call__ = timed  # type: ignore[method-assign]
        self.remove = lambda: setattr(KernelEntry, "__call__", call)


@dataclass(frozen=True)
class Pass:
    """One decode pass: seconds, CPU seconds outside of kernels, and number of kernel calls."""

    total: float
    kernels: float
    waiting: float
    cpu: float
    calls: int

    @property
    def python(self) -> float:
        return self.total - self.kernels - self.waiting

    @property
    def share(self) -> float:
        return self.python / self.total


def measure(model: Any, tokens: int) -> list[Pass]:
    """Measure decode passes after a short prompt and a few tokens that are not counted."""
    passes, clock = Passes(model), KernelClock()
    passes.prefill(16)
    passes.decode(8)
    meter, measured = model.greenroom.driver.meter, []
    clock.install()
    try:
        for _ in range(tokens):
            before = clock.seconds, meter.stall_s, time.thread_time() - clock.cpu, clock.calls
            (total,) = passes.decode(1)
            after = clock.seconds, meter.stall_s, time.thread_time() - clock.cpu, clock.calls
            measured.append(Pass(total, *(b - a for a, b in zip(before, after, strict=True))))
    finally:
        clock.remove()
    return measured


def profile(model: Any, tokens: int) -> None:
    """Print the functions that take most CPU time of this thread, without clocks around kernels."""
    passes, profiler = Passes(model), cProfile.Profile(time.thread_time)
    passes.prefill(16)
    profiler.enable()
    passes.decode(tokens)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def row(model: Any, name: str, measured: list[Pass], hits: float) -> list[str]:
    def middle(part: str) -> float:
        return statistics.median(getattr(each, part) for each in measured)

    room = model.greenroom
    return [
        name, f"{room.stats().capacity}", f"{hits:.1%}",
        *(f"{middle(part) * 1e3:.2f}" for part in ("total", "kernels", "waiting", "python")),
        f"{middle('share'):.1%}", f"{middle('cpu') * 1e3:.2f}",
        f"{middle('cpu') / room.driver.pieces.layers * 1e6:.0f}", f"{middle('calls'):.0f}",
    ]  # fmt: skip


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--memory", help="of the process, such as 8GiB")
    parser.add_argument("--cache", help="slots in place of --memory, such as 25%%")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--profile", action="store_true", help="also a profile of as many tokens")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    amount = {"memory": args.memory} if args.memory else {"cache": args.cache or "25%"}
    model: Any = greenroom.load(args.model, context=1024, **amount)[0]
    print(f"commit {commit()}; {machine()}; {args.threads} threads\n")
    if model.greenroom.driver.all_have_slots:
        fill(Passes(model))
    model.greenroom.reset_stats()
    measured = measure(model, args.tokens)
    name = Path(args.model).name
    print(table(COLUMNS, [row(model, name, measured, model.greenroom.stats().hit_ratio)]))
    if args.profile:
        profile(model, args.tokens)


if __name__ == "__main__":
    main()
