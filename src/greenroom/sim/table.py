"""Tables of simulation results as text and HTML."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from greenroom.trace import Trace

LEFT = ("system", "policy", "prefetch")  # columns that are aligned to the left


def show_time(seconds: float | None) -> str:
    """Format a time given in seconds as "12.3 ms" or "4.56 s"; None as "-"."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:,.2f} s"


def show_number(value: float) -> str:
    """Format a number with three significant digits, but all digits of its whole part."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def text_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: int | Container[int] = 1
) -> str:
    """Format a table for a terminal.

    left: the columns that are left-aligned: the first ones, or those with the given indices;
          others are right-aligned
    """
    left_aligned = range(left) if isinstance(left, int) else left
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def show(line: list[str]) -> str:
        cells = [
            cell.ljust(width) if i in left_aligned else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([show(lines[0]), "  ".join("-" * w for w in widths), *map(show, lines[1:])])


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """Return an HTML table; texts are escaped, and an empty caption is left out."""

    def line(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    above = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = "".join(line(row, "td") for row in rows)
    return f"<table>{above}<thead>{line(header, 'th')}</thead><tbody>{body}</tbody></table>"


def trace_heading(trace: Trace, row: Mapping[str, Any]) -> str:
    """Return two lines of text that describe a trace and how it is simulated."""
    return (
        f"{trace.meta.get('model', 'trace')}: {trace.tokens:,} tokens of {trace.requests:,}"
        f" requests, {int(trace.offsets[-1]):,} experts in {trace.layers} layers, top-{trace.top_k}"
        f"\norder {row['order']}, scope {row['scope']}, pin {row['pin']}"
    )


def rows_text(above: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table of simulation results for a terminal, below the text `above`."""
    return f"{above}\n\n{text_table(header, rows, sum(title in LEFT for title in header))}"


def table_of(rows: Sequence[Mapping[str, Any]], experts: int) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of the table of simulation results, without empty columns.

    `rows` are results as `greenroom simulate --json` prints them. `experts` is the number of all
    experts, to show capacities as shares.
    """
    entries = [_with_shares(row, experts) for row in rows]
    ahead = any("prefetches" in row for row in rows)
    chosen = [
        (title, name, show)
        for title, name, show in COLUMNS
        if any(entry.get(name) is not None for entry in entries) and (ahead or name != "prefetch")
    ]
    lines = [
        ["-" if entry.get(name) is None else show(entry[name]) for _, name, show in chosen]
        for entry in entries
    ]
    return [title for title, _, _ in chosen], lines


def _with_shares(row: Mapping[str, Any], experts: int) -> dict[str, Any]:
    """Add fields for the table to a result: sizes as text, counts of prefetches as shares."""
    entry = {**row, "size": f"{row['capacity']:,} ({row['capacity'] / experts:.0%})"}
    if row.get("seconds"):
        entry["stalled"] = row["stall_s"] / row["seconds"]
    for name in ("useful", "late", "wasted"):
        if name in row:
            entry[name] = row[name] / row["prefetches"] if row["prefetches"] else None
    return entry


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else show_number(value)


def _share(value: float) -> str:
    return f"{value:.0%}"


def _ratio(value: float) -> str:
    return f"{value:.2%}"


# Title, field of a cell, and format of each column.
COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    *((name, name, str) for name in LEFT),
    ("capacity", "size", str),
    ("requests", "requests", _number),
    ("misses", "misses", _number),
    ("miss ratio", "miss_ratio", _ratio),
    ("above floor", "above_floor", "{:+.1%}".format),
    ("TTFT", "ttft_s", show_time),
    ("TPOT", "tpot_s", show_time),
    ("TPOT p95", "tpot_p95_s", show_time),
    ("tokens/s", "tokens_per_s", _number),
    ("stalled", "stalled", _share),
    ("accuracy", "accuracy", _share),
    ("GOODPRED", "goodpred", _share),
    ("prefetches", "prefetches", _number),
    *((name, name, _share) for name in ("useful", "late", "wasted")),
    ("inexact", "inexact_share", "{:.1%}".format),
)
