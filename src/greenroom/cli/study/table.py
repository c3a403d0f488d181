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
    named = "system" in first
    header = [
        *["system"] * named,
        "policy",
        *["prefetch"] * ahead,
        "capacity",
        "requests",
        "misses",
        "miss ratio",
    ]
    if "seconds" in first:
        header += ["TTFT", "TPOT", "TPOT p95", "tokens/s", "stalled"]
    if ahead:
        header += ["accuracy", "prefetches", "useful", "late", "wasted"]
    header += ["inexact"] * inexact
    lines = [_line(row, experts, ahead, inexact) for row in rows]
    return (
        f"{trace.meta.get('model', 'trace')}: {trace.tokens:,} tokens of {trace.requests:,}"
        f" requests, {experts:,} experts in {trace.layers} layers, top-{trace.top_k}\n"
        f"order {first['order']}, scope {first['scope']}, pin {first['pin']}\n\n"
        + columns(header, lines, left=1 + ahead + named)
    )


def _line(row: Row, experts: int, ahead: bool, inexact: bool) -> list[str]:
    """A row of the table; `ahead`: with what became of the prefetches, as shares of them;
    `inexact`: with the share of evaluations that were."""
    from greenroom.sim.report import show_time

    def share(part: float | None, of: float = 1.0) -> str:
        return "-" if part is None or not of else f"{part / of:.0%}"

    line = [
        *([row["system"]] if "system" in row else []),
        row["policy"],
        *[row.get("prefetch", "")] * ahead,
        f"{row['capacity']:,} ({row['capacity'] / experts:.0%})",
        f"{row['requests']:,}",
        f"{row['misses']:,}",
        f"{row['miss_ratio']:.2%}",
    ]
    if "seconds" in row:
        times, rate = (
            [row[name] for name in ("ttft_s", "tpot_s", "tpot_p95_s")],
            row["tokens_per_s"],
        )
        line += ["-" if seconds is None else show_time(seconds) for seconds in times]
        line += ["-" if rate is None else f"{rate:.3g}", share(row["stall_s"], row["seconds"])]
    if ahead:
        begun = row.get("prefetches", 0)
        ends = [share(row.get(name), begun) for name in ("useful", "late", "wasted")]
        line += [share(row.get("accuracy")), f"{begun:,}", *ends]
    if inexact:
        line.append(f"{row.get('inexact_share', 0.0):.1%}")
    return line
