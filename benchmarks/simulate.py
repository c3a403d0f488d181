"""Speed of trace replay, compared with libcachesim's fast path on the same trace.

    python benchmarks/simulate.py TRACE [--capacity 20% 40% 60%] [--repeat 5] [--tokens N]

Pairs are interleaved: libcachesim, then Greenroom, `--repeat` times. A figure is the median in
million requests a second of CPU time; the ratio is the median of the pairs' ratios. Compilation is
left out and reported. libcachesim (PyPI) reads an oracleGeneral file of the same requests with
`TraceReader` and serves them in `process_trace`, nothing pinned; both are single-threaded. `memory`
is the peak of Greenroom's allocations during a replay, without the stream itself.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from greenroom.policies import POLICIES, policy
from greenroom.sim.curves import lru_curve
from greenroom.sim.replay import replay
from greenroom.study import save_oracle_general
from greenroom.trace import load, stream

THEIRS = {
    "lru": "LRU",
    "fifo": "FIFO",
    "lfu-in-cache": "LFU",
    "opt": "Belady",
    "sieve": "Sieve",
    "s3fifo": "S3FIFO",
    "arc": "ARC",
    "lfuda": "LFUDA",
    "random": "Random",
}
# What the project promises: times libcachesim's rate.
PROMISED = {"lru": 3.0, "fifo": 1.0, "lfu-in-cache": 1.0, "opt": 1.0}


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """(CPU seconds, result) of a call."""
    begin = time.process_time()
    result = call()
    return time.process_time() - begin, result


def peak(call: Callable[[], Any]) -> int:
    """Largest number of bytes that a call has allocated at once."""
    tracemalloc.start()
    call()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--capacity", nargs="+", default=["20%", "40%", "60%"])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tokens", type=int, help="use only that many")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    args = parser.parse_args()

    try:
        import libcachesim
    except ModuleNotFoundError:
        sys.exit("libcachesim is missing: pip install 'greenroom[bench]'")

    trace = load(args.trace)
    requests, offsets = stream(trace, "natural", args.tokens), trace.offsets
    n, experts = requests.pieces.size, int(offsets[-1])
    size = sum(array.nbytes for array in requests)
    print(f"{n} requests of {experts} experts; the stream is {size / 1e6:.0f} MB")
    print("| policy | capacity | compile s | M requests/s | libcachesim | ratio | memory/stream |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.oracleGeneral.bin"
        save_oracle_general(trace if args.tokens is None else trace.head(args.tokens), file)
        reader = libcachesim.TraceReader(str(file), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
        few = stream(trace, "natural", 1)
        for name in args.policies:
            chosen = policy(name)
            compiling, _ = seconds(
                lambda p=chosen: replay(few, offsets, experts // 5, p, pin="none")
            )
            for text in args.capacity:
                share = text.endswith("%")
                capacity = experts * int(text[:-1]) // 100 if share else int(text)
                ours, theirs, misses = [], [], (0, 0)
                for _ in range(args.repeat):
                    if name in THEIRS:
                        cache = getattr(libcachesim, THEIRS[name])(capacity)
                        spent, (ratio, _) = seconds(lambda c=cache: c.process_trace(reader))
                        theirs.append(spent)
                        misses = (round(ratio * n), 0)
                    spent, done = seconds(
                        lambda p=chosen, c=capacity: replay(requests, offsets, c, p, pin="none")
                    )
                    ours.append(spent)
                    misses = (misses[0], done.misses)
                allocated = peak(
                    lambda p=chosen, c=capacity: replay(requests, offsets, c, p, pin="none")
                )
                row = [name, str(capacity), f"{compiling:.1f}"]
                row.append(f"{n / statistics.median(ours) / 1e6:.1f}")
                if theirs:
                    gain = statistics.median(t / o for t, o in zip(theirs, ours, strict=True))
                    same = "" if misses[0] == misses[1] else " (other misses)"
                    short = " LESS THAN PROMISED" if gain < PROMISED.get(name, 0) else ""
                    row += [
                        f"{n / statistics.median(theirs) / 1e6:.1f}{same}",
                        f"{gain:.1f}{short}",
                    ]
                else:
                    row += ["", ""]
                print("| " + " | ".join([*row, f"{allocated / size:.2f}"]) + " |", flush=True)
    lru_curve(few, offsets)
    pairs = []
    for _ in range(args.repeat):
        once, _ = seconds(
            lambda: replay(requests, offsets, experts * 2 // 5, policy("lru"), pin="none")
        )
        curve, _ = seconds(lambda: lru_curve(requests, offsets))
        pairs.append(curve / once)
    print(f"\nThe whole LRU curve takes {statistics.median(pairs):.1f} times one LRU run.")


if __name__ == "__main__":
    main()
