"""The rows of `greenroom simulate` as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from greenroom.cli.terminal.files import columns

if TYPE_CHECKING:
    from greenroom.sim.study import Row
    from greenroom.trace import Trace


def table(rows: list[Row], trace: Trace) -> str:
    """The rows for people."""
    experts, first = int(trace.offsets[-1]), rows[0]
    ahead = any("prefetches" in row for row in rows)
    inexact = any("inexact_share" in row for row in rows)
    lines = [_cells(row, experts, ahead, inexact) for row in rows]
    return (
        f"{trace.meta.get('model', 'trace')}: {trace.tokens:,} tokens of {trace.requests:,}"
        f" requests, {experts:,} experts in {trace.layers} layers, top-{trace.top_k}\n"
        f"order {first['order']}, scope {first['scope']}, pin {first['pin']}\n\n"
        + columns(
            list(lines[0]),
            [list(line.values()) for line in lines],
            left=1 + ahead + ("system" in first),
        )
    )


def _cells(row: Row, experts: int, ahead: bool, inexact: bool) -> dict[str, str]:
    """A row by its columns; `ahead`: with what became of the prefetches, as shares of them;
    `inexact`: with the share of evaluations that were."""
    from greenroom.sim.report import show_time

    def share(part: float | None, of: float = 1.0) -> str:
        return "-" if part is None or not of else f"{part / of:.0%}"

    cells = {"system": row["system"]} if "system" in row else {}
    cells["policy"] = row["policy"]
    if ahead:
        cells["prefetch"] = row.get("prefetch", "")
    cells |= {
        "capacity": f"{row['capacity']:,} ({row['capacity'] / experts:.0%})",
        "requests": f"{row['requests']:,}",
        "misses": f"{row['misses']:,}",
        "miss ratio": f"{row['miss_ratio']:.2%}",
    }
    if "seconds" in row:
        times = {"TTFT": "ttft_s", "TPOT": "tpot_s", "TPOT p95": "tpot_p95_s"}
        for title, name in times.items():
            cells[title] = "-" if row[name] is None else show_time(row[name])
        rate = row["tokens_per_s"]
        cells["tokens/s"] = "-" if rate is None else f"{rate:.3g}"
        cells["stalled"] = share(row["stall_s"], row["seconds"])
    if ahead:
        begun = row.get("prefetches", 0)
        cells |= {"accuracy": share(row.get("accuracy")), "prefetches": f"{begun:,}"}
        cells |= {name: share(row.get(name), begun) for name in ("useful", "late", "wasted")}
    if inexact:
        cells["inexact"] = f"{row.get('inexact_share', 0.0):.1%}"
    return cells
