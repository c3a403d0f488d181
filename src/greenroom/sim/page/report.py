"""The HTML report of a simulation: one file without external resources."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from greenroom.drawing.files import joined_script, style_sheet
from greenroom.sim.page.figures import (
    Bar,
    PlottedCurve,
    Points,
    bar_chart,
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
STATIC = files("greenroom.sim.page") / "static"
MAP = (
    '<form id="player"></form><p class="note" id="slots"></p><div id="drawing"></div>'
    "<noscript><p>The map needs JavaScript.</p></noscript>"
)
Facts = Sequence[tuple[str, str]]
Row = Mapping[str, Any]


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
    recording: Mapping[str, Any],
    rows: Sequence[Row],
) -> str:
    """Build the HTML report of a simulation as one page.

    facts:    (name, value) pairs about the trace and the machine
    curves:   points (capacity, miss ratio) by policy, in order of capacity
    floor:    points of the lower bound: the policy OPT, without protection of a step's experts
    recording: what was in the cache, of the result that `highlighted` selects (see `recording.py`)
    rows:     results as `--json` prints them; results with prefetching are in the table and in the
              chart of times, not in the curves
    """
    ahead = _has_prefetching(rows)
    drawn = [PlottedCurve(name, points, i) for i, (name, points) in enumerate(curves.items())]
    least = PlottedCurve(FLOOR, floor, -1)
    setting = ", ".join(f"{name} {value}" for name, value in settings.items())
    sections = [
        card("Miss ratio by capacity", f"{setting}{', without prefetching' * ahead}."
             " Shaded: no policy can have so few misses.",
             legend([*drawn, least]) + miss_ratio_chart(drawn, least, experts)),
        *_time_cards(rows, list(curves), experts),
        card("Experts", _map_note(rows, experts), MAP),
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
        "recording": recording,
    }
    fact_line = " · ".join(f"<span>{escape(f'{n} {v}')}</span>" for n, v in facts[1:6])
    return html_page(
        f"{title}: expert caching",
        f'<h1>{escape(title)}</h1><p class="about">{fact_line}</p>'
        f"{_tiles(rows, dict(floor), experts)}{''.join(sections)}",
        '<div class="tip" role="status"></div>'
        f'<script type="application/json" id="data">{_json(data)}</script>'
        f'<script type="module">\n{joined_script(STATIC / "report.js")}</script>',
    )


def _name(row: Row) -> str:
    """Return the name of a result in the report: its policy, and its predictor if it has one."""
    return f"{row['policy']} + {row['prefetch']}" if "prefetches" in row else str(row["policy"])


def _time_cards(rows: Sequence[Row], policies: list[str], experts: int) -> list[str]:
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


def highlighted(rows: Sequence[Row]) -> int:
    """Return the number of the best result at the middle capacity.

    It has the fewest misses without knowing the future; with prefetching the least time.
    """
    capacities = sorted({row["capacity"] for row in rows})
    capacity = capacities[(len(capacities) - 1) // 2]
    candidates = [number for number, row in enumerate(rows) if row["capacity"] == capacity]
    field = "seconds" if _has_prefetching(rows) else "miss_ratio"
    if field == "miss_ratio":
        candidates = [n for n in candidates if rows[n]["policy"] != "opt"] or candidates
    return min(candidates, key=lambda number: float(rows[number][field]))


def _has_prefetching(rows: Sequence[Row]) -> bool:
    return any("prefetches" in row for row in rows)


def _map_note(rows: Sequence[Row], experts: int) -> str:
    best = rows[highlighted(rows)]
    also = ", without prefetching" * _has_prefetching(rows)
    return (
        f"{best['policy']} at {best['capacity'] / experts:.0%}{also}. A row a layer, a column an"
        " expert. The colour says where the expert is, a darker shade (in the dark: a lighter one)"
        " how often it is used beside its layer's mean. At the right: each layer's misses."
    )


def _tiles(rows: Sequence[Row], floor: Mapping[int, float], experts: int) -> str:
    """Return tiles with the best result at the middle capacity, and the lower bound."""
    best = rows[highlighted(rows)]
    capacity = best["capacity"]
    at = f"at {capacity / experts:.0%} ({capacity:,} experts)"
    tiles = [(f"{best['requests']:,}", "requests")]
    if _has_prefetching(rows):
        tiles += [
            (_name(best), f"fastest {at}"),
            (show_time(best["seconds"]), "its time for all requests"),
            (
                f"{best['stall_s'] / (best['seconds'] or 1):.2%}",
                "of that time waiting for experts",
            ),
        ]
    else:
        tiles += [
            (str(best["policy"]), f"fewest misses {at}"),
            (f"{best['miss_ratio']:.2%}", "its miss ratio"),
            (f"{floor[capacity]:.2%}", "miss ratio of OPT, the lower bound"),
        ]
    return '<div class="tiles">' + "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(text)}</span></div>'
        for value, text in tiles
    ) + "</div>"  # fmt: skip


def _with_floor(rows: Sequence[Row], floor: Mapping[int, float]) -> list[dict[str, Any]]:
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
        f"<title>{escape(title)}</title>"
        f"<style>\n{style_sheet()}{(STATIC / 'report.css').read_text()}</style></head>\n"
        f"<body><main>{main}</main>{tail}</body></html>\n"
    )


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
