"""Cost of the link's copies for the computation: passes with an idle and a busy link.

    python benchmarks/replay/link.py bench-data/olmoe-8 olmoe-1b-7b.npz

A link of this machine is a thread that copies. So a replay at a ratio of transfer to compute is
valid only where these copies do not slow the computation: both go through the same
memory. Every expert is resident; two lanes carry random experts into slots of no use, at each
bandwidth; pairs of passes of the same token, with an idle and a busy link, are interleaved.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
from rig import READERS, Rig, arguments, cut, forced

from common import commit, machine, note, ratio, table  # isort: skip
from greenroom.runtime.slots.host import HostSlots
from greenroom.runtime.store.disk import Staging


class Traffic:
    """Transfer lanes that copy experts for as long as the context lasts."""

    def __init__(self, rig: Rig, bandwidth: float) -> None:
        self._rig, self._stop = rig, threading.Event()
        self._slots = HostSlots(16, rig.catalog.slot_bytes)
        self.bytes = [0] * READERS
        rig.ram.throttle.bandwidth = bandwidth

    def __enter__(self) -> Traffic:
        lanes = range(READERS)
        self._threads = [threading.Thread(target=self._carry, args=(lane,)) for lane in lanes]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _carry(self, lane: int) -> None:
        draw, staging = np.random.default_rng(lane), Staging()
        while not self._stop.is_set():
            expert, slot = int(draw.integers(self._rig.catalog.experts)), int(draw.integers(16))
            for chunk in self._rig.ram.chunks(expert):
                data = self._rig.ram.read(chunk, staging)
                self._slots.write(slot, chunk.extent.copies, data, chunk.start)
                self.bytes[lane] += chunk.length


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--bandwidths", type=float, nargs="+", default=[0.5, 1, 2, 4],
                        metavar="GB/s")  # fmt: skip
    parser.add_argument("--passes", type=int, default=4, help="of a block: default %(default)s")
    parser.add_argument("--repeats", type=int, default=4, help="blocks: default %(default)s")
    args = parser.parse_args()
    rig = Rig(args.model, args.trace, kernels=args.kernels, threads=args.threads)
    print(
        f"commit {commit()}; {machine()}; kernels {args.kernels}, threads {args.threads}\n",
        flush=True,
    )
    rig.attach(rig.catalog.experts)
    rig.fill()
    rows = []
    with forced(rig.model, cut(rig.trace, args.passes + 1).select(range(args.repeats))) as routing:
        for bandwidth in args.bandwidths:
            pairs, rates = [], []
            for repeat in range(args.repeats):
                first = repeat * (args.passes + 1)
                passes = range(first, first + args.passes + 1)
                idle_link = routing.play(passes)[1:]
                with Traffic(rig, bandwidth * 1e9) as traffic:
                    busy = routing.play(passes)
                    rates.append(sum(traffic.bytes) / sum(busy))
                pairs += list(zip(busy[1:], idle_link, strict=True))
            slower, low, high = ratio(pairs)
            row = {
                "bandwidth": bandwidth * 1e9, "carried": float(np.median(rates)),
                "alone_s": float(np.median([a for _, a in pairs])),
                "slower": slower, "low": low, "high": high,
                "kernels": args.kernels, "threads": args.threads,
            }  # fmt: skip
            note(json.dumps(row))
            if args.out:
                with Path(args.out).open("a") as file:
                    file.write(json.dumps(row) + "\n")
            rows.append((
                f"{bandwidth:g} GB/s", f"{row['carried'] / 1e9:.2f}",
                f"{row['alone_s'] * 1e3:.0f}", f"{slower:.3f} ({low:.3f} to {high:.3f})",
            ))  # fmt: skip
    print(table(("link", "carried, GB/s", "pass alone, ms", "x slower with the link"), rows))


if __name__ == "__main__":
    main()
