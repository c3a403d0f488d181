"""The benchmark's recordings, its nine cells and the score.

docs/benchmark.md has the definitions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from referee import judge

from greenroom.core.policy import Policy
from greenroom.core.stream import Stream
from greenroom.policies import policy
from greenroom.sim.replay import replay
from greenroom.study.gap import gap_closed, half_of
from greenroom.trace import Trace, stream

FOLDER = Path(__file__).parent
RECORDINGS: dict[str, dict[str, Any]] = json.loads((FOLDER / "recordings.json").read_text())
SHARES = (20, 40, 60)  # capacity in % of all experts
ORDERS = (None, 1, 2)  # of the requests: as stored, and two shuffles by their seeds
PIN = "none"
SEED = 0  # of policies that draw random numbers


@dataclass(frozen=True)
class Cell:
    """Misses of one recording at one capacity, in one order of the requests."""

    recording: str
    percent: int
    order: int | None
    requests: int
    lru: int
    opt: int
    misses: int

    @property
    def gap_closed(self) -> float:
        return gap_closed(self.lru, self.misses, self.opt)

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "order": self.order or "stored", "gap_closed": self.gap_closed}


def digest_of(trace: Trace) -> str:
    """Compute the SHA-256 of a recording's routing, whatever file it is stored in.

    It covers what a replay reads: experts, weights where recorded, passes and requests.
    """
    total = hashlib.sha256()
    for array in (
        trace.experts_per_layer, trace.request_starts, trace.pass_starts, trace.pass_prefill,
        trace.experts, trace.weights,
    ):  # fmt: skip
        if array is not None:
            total.update(f"{array.dtype} {array.shape}".encode())
            total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def measure(chosen: Policy, name: str, trace: Trace, workers: int) -> Iterator[Cell]:
    """Measure a policy's cells of one recording; RuleError if it breaks a rule on the way."""
    experts = int(trace.offsets[-1])

    def cell(requests: Stream, order: int | None, percent: int) -> Cell:
        capacity = experts * percent // 100
        lru, opt = (
            replay(requests, trace.offsets, capacity, policy(each), pin=PIN).misses
            for each in ("lru", "opt")
        )
        verdict = judge(chosen, requests, trace.offsets, capacity, PIN, SEED)
        return Cell(name, percent, order, requests.pieces.size, lru, opt, verdict.misses)

    for order in ORDERS:
        requests = stream(half_of(trace, "report", order), "natural")
        with ThreadPoolExecutor(workers) as pool:  # a replay releases the GIL
            yield from pool.map(partial(cell, requests, order), SHARES)


def means_of(cells: list[Cell]) -> dict[str, list[float]]:
    """Compute a policy's nine cells: for each recording, the shares of the gap by capacity.

    Each is the mean over the orders of the requests.
    """
    return {
        name: [
            float(np.mean([
                c.gap_closed for c in cells if (c.recording, c.percent) == (name, percent)
            ]))
            for percent in SHARES
        ]
        for name in dict.fromkeys(cell.recording for cell in cells)
    }  # fmt: skip


def row_of(name: str, means: dict[str, list[float]]) -> str:
    """Return a policy's row of the table in docs/benchmark.md."""
    cells = [" / ".join(f"{100 * gap:.1f}" for gap in gaps) for gaps in means.values()]
    return f"| {' | '.join([name, *cells, f'{100 * score_of(means):.1f}'])} |"


def score_of(means: dict[str, list[float]]) -> float:
    """Compute the score, the mean of the nine cells."""
    return float(np.mean([gap for gaps in means.values() for gap in gaps]))
