"""The HTML report of a simulation: one file without external resources."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from greenroom.sim.figures import (
    Bar,
    PlottedCurve,
    Points,
    bar_chart,
    heat_map,
    legend,
    miss_ratio_chart,
)
from greenroom.sim.table import html_table, show_time, table_of

FLOOR = "OPT without pinning (lower bound)"
PREFETCH_NOTE = (
    " A prefetch is useful (loaded before its expert was needed), late (still loading then), wasted"
    " (loaded, but not needed), or cancelled. Accuracy: the share of needed experts that were"
    " predicted. GOODPRED: accuracy x the share of absent predicted experts that were loaded in"
    " time, a mean over layers."
)
Facts = Sequence[tuple[str, str]]


def report(
    *,
    title: str,
    facts: Facts,
    settings: Mapping[str, str],
    command: str,
    experts: int,
    tokens: int,
    curves: Mapping[str, Points],
    floor: Points,
    counts: Sequence[Sequence[int]],
    rows: Sequence[Mapping[str, Any]],
) -> str:
    """Build the HTML report of a simulation as one page.

    facts:    (name, value) pairs about the trace and the machine
    curves:   points (capacity, miss ratio) by policy, in order of capacity
    floor:    points of the lower bound: the policy OPT, without protection of a step's experts
    counts:   tokens that chose an expert, [layer][expert]
    rows:     results as `--json` prints them; results with prefetching are in the table and in the
              chart of times, not in the curves
    """
    ahead = any("prefetches" in row for row in rows)
    drawn = [PlottedCurve(name, points, i) for i, (name, points) in enumerate(curves.items())]
    least = PlottedCurve(FLOOR, floor, -1)
    setting = ", ".join(f"{name} {value}" for name, value in settings.items())
    sections = [
        card("Miss ratio by capacity", f"{setting}{', without prefetching' * ahead}."
             " Shaded: no policy can have so few misses.",
             legend([*drawn, least]) + miss_ratio_chart(drawn, least, experts)),
        *_time_cards(rows, list(curves), experts),
        card("Which experts are used", "One row a layer, one column an expert. The colour shows how"
             " many tokens chose the expert.", heat_map(counts)),
        card("Results", "Each policy at each capacity. Above floor: extra misses relative"
             " to OPT without pinning, which knows the future." + PREFETCH_NOTE * ahead,
             scrollable(html_table(*table_of(_with_floor(rows, dict(floor)), experts)))),
        provenance_card(command, facts),
    ]  # fmt: skip
    points = {n for curve in drawn for n, _ in curve.points}
    shared_points = [point for point in floor if point[0] in points]
    data = {
        "experts": experts,
        "tokens": tokens,
        "curves": [
            {"name": c.name, "points": list(c.points)}
            for c in (*drawn, least._replace(points=shared_points))
        ],
        "counts": [list(row) for row in counts],
    }
    fact_line = " · ".join(f"<span>{escape(f'{n} {v}')}</span>" for n, v in facts[1:6])
    return html_page(
        f"{title}: expert caching",
        f'<h1>{escape(title)}</h1><p class="about">{fact_line}</p>'
        f"{_tiles(rows, dict(floor), experts)}{''.join(sections)}",
        '<div class="tip" role="status"></div>'
        f'<script type="application/json" id="data">{_json(data)}</script>'
        f"<script>\n{_asset('report.js')}</script>",
    )


def _name(row: Mapping[str, Any]) -> str:
    """Return the name of a result in the report: its policy, and its predictor if it has one."""
    return f"{row['policy']} + {row['prefetch']}" if "prefetches" in row else str(row["policy"])


def _time_cards(rows: Sequence[Mapping[str, Any]], policies: list[str], experts: int) -> list[str]:
    """Return a section with bars of the time per token; none unless a result has prefetching."""
    timed = [row for row in rows if row.get("tpot_s") is not None]
    if not timed or all("prefetches" not in row for row in rows):
        return []
    drawn = [
        Bar(
            _name(row),
            f"{row['capacity'] / experts:.0%} ({row['capacity']:,} experts)",
            row["tpot_s"],
            row["tpot_p95_s"],
            show_time(row["tpot_s"]),
            policies.index(row["policy"]),
            "prefetches" not in row,
        )
        for row in sorted(timed, key=lambda row: int(row["capacity"]))
    ]
    note = (
        "Time per output token (TPOT) by capacity. Bar: median. Line: 95th percentile. Pale: no"
        " prefetching."
    )
    return [card("Time of a token", note, bar_chart(drawn))]


def _tiles(rows: Sequence[Mapping[str, Any]], floor: Mapping[int, float], experts: int) -> str:
    """Return tiles with the best result at the middle capacity, and the lower bound."""
    capacities = sorted({row["capacity"] for row in rows})
    capacity = capacities[(len(capacities) - 1) // 2]
    candidates = [row for row in rows if row["capacity"] == capacity]
    at = f"at {capacity / experts:.0%} ({capacity:,} experts)"
    tiles = [(f"{candidates[0]['requests']:,}", "requests")]
    if any("prefetches" in row for row in rows):
        fastest = min(candidates, key=lambda row: float(row["seconds"]))
        tiles += [
            (_name(fastest), f"fastest {at}"),
            (show_time(fastest["seconds"]), "its time for all requests"),
            (
                f"{fastest['stall_s'] / (fastest['seconds'] or 1):.2%}",
                "of that time waiting for experts",
            ),
        ]
    else:
        online_rows = [row for row in candidates if row["policy"] != "opt"]  # OPT knows the future
        best = min(online_rows or candidates, key=lambda row: float(row["miss_ratio"]))
        tiles += [
            (str(best["policy"]), f"fewest misses {at}"),
            (f"{best['miss_ratio']:.2%}", "its miss ratio"),
            (f"{floor[capacity]:.2%}", "miss ratio of OPT, the lower bound"),
        ]
    return '<div class="tiles">' + "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(text)}</span></div>'
        for value, text in tiles
    ) + "</div>"  # fmt: skip


def _with_floor(
    rows: Sequence[Mapping[str, Any]], floor: Mapping[int, float]
) -> list[dict[str, Any]]:
    """Sort results by capacity, and add each one's excess of misses over the lower bound.

    The excess is None with prefetching, for which the lower bound does not hold.
    """
    result = []
    for row in sorted(rows, key=lambda row: int(row["capacity"])):  # keeps the order of policies
        least = floor[row["capacity"]] * row["requests"]
        above = row["misses"] / least - 1 if least else 0.0
        result.append({**row, "above_floor": None if "prefetches" in row else above})
    return result


def html_page(title: str, main: str, tail: str = "") -> str:
    """Build a complete HTML page that contains its style sheet."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{_asset('report.css')}</style></head>\n"
        f"<body><main>{main}</main>{tail}</body></html>\n"
    )


def _asset(name: str) -> str:
    return (files("greenroom.sim") / "page" / name).read_text()


def card(title: str, note: str, body: str) -> str:
    """Return a section of an HTML report: heading, note and content (`body`, HTML)."""
    text = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{text}{body}</section>'


def scrollable(table: str) -> str:
    """Wrap an HTML table in an element that scrolls sideways."""
    return f'<div class="wide">{table}</div>'


def provenance_card(command: str, facts: Facts) -> str:
    """Return a report's section with the command and the inputs that produced the page."""
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return card("Command and inputs", "", f"<pre>{escape(command)}</pre><dl>{items}</dl>")


def _json(data: Any) -> str:
    """Encode JSON for an HTML script element, without any tag that could end the script."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
