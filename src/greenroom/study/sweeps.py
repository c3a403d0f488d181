"""Sweeps over several routing traces, as one table."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from greenroom.core.policy import Policy
from greenroom.errors import UsageError
from greenroom.sim.simulation import Simulation, simulate
from greenroom.study.gap import gap_closed
from greenroom.study.tables import table
from greenroom.trace import Trace

if TYPE_CHECKING:
    import pyarrow as pa

TIMED = ("machine", "prefetch", "speculate")  # options with which misses have no lower bound


def sweep(
    traces: Mapping[str, str | os.PathLike[str] | Trace],
    policy: str | Policy | Sequence[str | Policy],
    capacity: str | int | Sequence[str | int] = "25%",
    **options: Any,
) -> pa.Table:
    """Simulate each eviction policy at each capacity on each trace; return one Arrow table.

    traces:  files or traces, by the names that the column `trace` gets
    options: those of `simulate`

    The columns are those of `table`, after `trace`; before the others come `share` (the capacity as
    a share of all experts) and, without a machine, `gap_closed` (the share of the gap between LRU
    and OPT, as docs/benchmark.md defines it). Raises UsageError if there are no traces.
    """
    if not traces:
        raise UsageError("traces is empty: give at least one trace")
    rows: list[dict[str, Any]] = []
    for name, trace in traces.items():
        results = simulate(trace, policy, capacity, **options)
        gaps = {} if any(options.get(each) for each in TIMED) else _gaps(results, options)
        rows += [
            {"trace": name, "share": row["capacity"] / results.experts, **gaps.get(n, {}), **row}
            for n, row in enumerate(results)
        ]
    return table(rows)


def _gaps(results: Simulation, options: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """Compute `gap_closed` of each result: LRU as the policies are simulated, OPT without pinning.

    Returns fields by the number of the result.
    """
    slots = sorted({int(row["capacity"]) for row in results})
    lru, opt = (
        {
            row["capacity"]: int(row["misses"])
            for row in simulate(results.trace, each, slots, **{**options, "limit": None, **pin})
        }
        for each, pin in (("lru", {}), ("opt", {"pin": "none"}))
    )
    return {
        n: {"gap_closed": gap_closed(lru[row["capacity"]], row["misses"], opt[row["capacity"]])}
        for n, row in enumerate(results)
    }
