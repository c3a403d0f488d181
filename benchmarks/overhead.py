"""Cost of prediction and bookkeeping in a decode token, in microseconds of CPU time.

    python benchmarks/overhead.py bench-data/moe1.7b-zipf1.0

All experts but one in a thousand are resident, so that there is something to predict for, and
nearly nothing to wait for. Each variant (what --prefetch takes, without a guard) gets a cache of
its own of one loaded model, in turns. Thread time is taken inside the calls:

    prediction   predictors, and the event machine's handling of their predictions
    bookkeeping  the event machine's other events: steps, chunks, groups

`of a token` is both over the CPU time of all the process's threads for a token; what `off` takes
less than the others is all that prefetching costs, hooks on routers included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import commit, machine, note, table
from ram_store import RamStore
from worker import Passes, fill

import greenroom
from greenroom.core.cache.cache import compile_for
from greenroom.core.events import Predicted
from greenroom.hf.attach.attach import Greenroom
from greenroom.policies import policy

PREDICTION, BOOKKEEPING = "prediction", "bookkeeping"
SETTLE = 4  # tokens that are not counted


class Meter:
    """Exclusive thread time of calls, by purpose."""

    def __init__(self, cache: Greenroom) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = 0.0
        driver: Any = cache.driver
        scheduler: Any = driver.scheduler
        scheduler.on = self._timed(scheduler.on, self._of_event)
        predictions: Any = driver.predictions
        predictions._call = self._timed(predictions._call, lambda *_: PREDICTION)

    @staticmethod
    def _of_event(event: Any, *_: Any) -> str:
        return PREDICTION if isinstance(event, Predicted) else BOOKKEEPING

    def _timed(self, call: Callable[..., Any], part: Callable[..., str]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            outer, self._inner, begin = self._inner, 0.0, time.thread_time()
            try:
                return call(*args, **options)
            finally:
                spent = time.thread_time() - begin
                self.seconds[part(*args)] += spent - self._inner
                self._inner = outer + spent

        return timed


def measured(model: Any, parts: Any, store: Any, variant: str, tokens: int) -> dict[str, float]:
    """Measure the seconds a token of one variant, with a cache of its own."""
    model.greenroom.detach()
    model.greenroom = cache = Greenroom(model, replace(parts, prefetch=variant), store)
    passes = Passes(model)
    fill(passes)
    passes.prefill(32)
    passes.decode(SETTLE)
    meter, cpu, begin = Meter(cache), time.process_time(), time.perf_counter()
    passes.decode(tokens)
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return {name: s / tokens for name, s in {"wall": wall, "cpu": cpu, **meter.seconds}.items()}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--variants", nargs="+", default=["off", "markov", "next-gate"])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    model: Any = greenroom.load(
        str(args.model), cache=1 << 28, prefetch="off", policy="next-use", context=1024
    )[0]
    catalog = model.greenroom.setup.catalog
    capacity = catalog.experts - max(1, catalog.experts // 1000)
    parts = replace(model.greenroom.setup, fingerprint="", guard=False, capacity=capacity)
    compile_for(policy("next-use"))
    store = RamStore(catalog)
    print(f"commit {commit()}; {machine()}; {capacity} of {catalog.experts} experts in slots\n")
    times_by_name: dict[str, list[dict[str, float]]] = defaultdict(list)
    for repeat in range(args.repeats):
        turn = repeat % len(args.variants)
        for variant in args.variants[turn:] + args.variants[:turn]:
            times_by_name[variant].append(measured(model, parts, store, variant, args.tokens))
            note(f"{variant}: {times_by_name[variant][-1]}")
    print(table(
        ("prefetch", "ms a token", "CPU ms a token", "prediction µs", "bookkeeping µs",
         "of a token"),
        [row(variant, times_by_name[variant]) for variant in args.variants],
    ))  # fmt: skip


def row(variant: str, runs: list[dict[str, float]]) -> tuple[str, ...]:
    def median(name: str) -> float:
        return statistics.median(run.get(name, 0.0) for run in runs)

    prediction, bookkeeping, cpu = median(PREDICTION), median(BOOKKEEPING), median("cpu")
    return (
        variant, f"{median('wall') * 1e3:.1f}", f"{cpu * 1e3:.1f}", f"{prediction * 1e6:.0f}",
        f"{bookkeeping * 1e6:.0f}", f"{(prediction + bookkeeping) / cpu:.1%}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
