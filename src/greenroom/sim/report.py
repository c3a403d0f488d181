"""One page that says what a study found: complete in itself, readable without a network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from greenroom.sim.figures import Bar, PlottedCurve, Points, bars, chart, heat, keys
from greenroom.sim.table import html_table, show_time, table_of

FLOOR = "OPT, not pinned: the floor"
AHEAD = (
    " Prefetches end as useful (there when asked for), late (on the way then), wasted (there, and"
    " not asked for), or are given up; GOODPRED: accuracy times the share that was there in time."
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
    """The page.

    facts:  (name, value) of the trace and the machine
    curves: policy -> (capacity, miss ratio), capacities ascending
    floor:  the same of OPT without pinning
    counts: [layer][expert], tokens that chose it
    rows:   the cells that were asked for, as `--json` prints them; those with prefetching are in
            the table and have their times drawn, and in no curve
    """
    ahead = any("prefetches" in row for row in rows)
    drawn = [PlottedCurve(name, points, i) for i, (name, points) in enumerate(curves.items())]
    least = PlottedCurve(FLOOR, floor, -1)
    setting = ", ".join(f"{name} {value}" for name, value in settings.items())
    sections = [
        card("Miss ratio by capacity", f"{setting}{', without prefetching' * ahead}."
             " Shaded: where no policy can come.",
             keys([*drawn, least]) + chart(drawn, least, experts)),
        *_times(rows, list(curves), experts),
        card("Which experts are used", "One row a layer, one column an expert, by how many"
             " tokens chose it.", heat(counts)),
        card("Results", "The cells that were asked for. Above floor: misses beyond those of"
             " OPT without pinning, which knows the future." + AHEAD * ahead,
             scrollable(html_table(*table_of(_above(rows, dict(floor)), experts)))),
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
    about = " · ".join(f"<span>{escape(f'{n} {v}')}</span>" for n, v in facts[1:6])
    return html_page(
        f"{title}: expert caching",
        f'<h1>{escape(title)}</h1><p class="about">{about}</p>'
        f"{_tiles(rows, dict(floor), experts)}{''.join(sections)}",
        '<div class="tip" role="status"></div>'
        f'<script type="application/json" id="data">{_json(data)}</script>'
        f"<script>\n{_asset('report.js')}</script>",
    )


def _name(row: Mapping[str, Any]) -> str:
    """A cell's policy, and its predictor if it has one."""
    return f"{row['policy']} + {row['prefetch']}" if "prefetches" in row else str(row["policy"])


def _times(rows: Sequence[Mapping[str, Any]], policies: list[str], experts: int) -> list[str]:
    """What a token takes in each cell, where prefetching is compared."""
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
    note = "TPOT by capacity: the median, and a line at the 95th percentile. Pale: no prefetching."
    return [card("Time of a token", note, bars(drawn))]


def _tiles(rows: Sequence[Mapping[str, Any]], floor: Mapping[int, float], experts: int) -> str:
    """The best cell at the middle one of the capacities, and what is left to gain."""
    capacities = sorted({row["capacity"] for row in rows})
    capacity = capacities[(len(capacities) - 1) // 2]
    candidates = [row for row in rows if row["capacity"] == capacity]
    at = f"at {capacity / experts:.0%} ({capacity:,} experts)"
    tiles = [(f"{candidates[0]['requests']:,}", "requests")]
    if any("prefetches" in row for row in rows):
        quickest = min(candidates, key=lambda row: float(row["seconds"]))
        tiles += [
            (_name(quickest), f"least time {at}"),
            (show_time(quickest["seconds"]), "its time there, of all requests"),
            (f"{quickest['stall_s'] / (quickest['seconds'] or 1):.2%}", "of it stalled"),
        ]
    else:
        able = [row for row in candidates if row["policy"] != "opt"]  # it knows the future
        best = min(able or candidates, key=lambda row: float(row["miss_ratio"]))
        tiles += [
            (str(best["policy"]), f"fewest misses {at}"),
            (f"{best['miss_ratio']:.2%}", "its miss ratio there"),
            (f"{floor[capacity]:.2%}", "OPT's, the floor, there"),
        ]
    return '<div class="tiles">' + "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(text)}</span></div>'
        for value, text in tiles
    ) + "</div>"  # fmt: skip


def _above(rows: Sequence[Mapping[str, Any]], floor: Mapping[int, float]) -> list[dict[str, Any]]:
    """The rows by capacity, those without prefetching with their misses above the floor."""
    result = []
    for row in sorted(rows, key=lambda row: int(row["capacity"])):  # stable: policies as named
        least = floor[row["capacity"]] * row["requests"]
        above = row["misses"] / least - 1 if least else 0.0
        result.append({**row, "above_floor": None if "prefetches" in row else above})
    return result


def html_page(title: str, main: str, tail: str = "") -> str:
    """A whole page, complete in itself."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{_asset('report.css')}</style></head>\n"
        f"<body><main>{main}</main>{tail}</body></html>\n"
    )


def _asset(name: str) -> str:
    return (files("greenroom.sim") / "page" / name).read_text()


def card(title: str, note: str, body: str) -> str:
    """A section of a page."""
    text = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{text}{body}</section>'


def scrollable(table: str) -> str:
    """A table that may be wider than the page."""
    return f'<div class="wide">{table}</div>'


def provenance_card(command: str, facts: Facts) -> str:
    """The section that says what a page was made by, and of what."""
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return card("Made by", "", f"<pre>{escape(command)}</pre><dl>{listed}</dl>")


def _json(data: Any) -> str:
    """JSON that cannot end the script element that it is in."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
