"""One page that says what a study found: complete in itself, readable without a network."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from greenroom.sim.figures import Bar, Curve, Points, bars, chart, heat, keys

FLOOR = "OPT, not pinned: the floor"
AHEAD = (
    " Prefetches end as useful (there when asked for), late (on the way then), wasted (there, and"
    " not asked for), or are given up; GOODPRED: accuracy times the share that was there in time."
)


@dataclass(frozen=True, slots=True)
class Report:
    """What the page shows.

    facts:  (name, value) of the trace and the machine
    curves: policy -> (capacity, miss ratio), capacities ascending
    floor:  the same of OPT without pinning
    counts: [layer][expert], tokens that chose it
    rows:   the cells that were asked for, as `--json` prints them; those with prefetching are in
            the table and have their times drawn, and in no curve
    """

    title: str
    facts: Sequence[tuple[str, str]]
    settings: Mapping[str, str]
    command: str
    experts: int
    tokens: int
    curves: Mapping[str, Points]
    floor: Points
    counts: Sequence[Sequence[int]]
    rows: Sequence[Mapping[str, Any]]

    def html(self) -> str:
        """The page."""
        curves = self._curves()
        floor = Curve(FLOOR, self.floor, -1)
        setting = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        sections = [
            card("Miss ratio by capacity", f"{setting}{', without prefetching' * self._ahead}."
                 " Shaded: where no policy can come.",
                 keys([*curves, floor]) + chart(curves, floor, self.experts)),
            *self._times(),
            card("Which experts are used", "One row a layer, one column an expert, by how many"
                 " tokens chose it.", heat(self.counts)),
            card("Results", "The cells that were asked for. Above floor: misses beyond those of"
                 " OPT without pinning, which knows the future." + AHEAD * self._ahead,
                 self._table()),
            card("Made by", "", f"<pre>{escape(self.command)}</pre>{_facts(self.facts)}"),
        ]  # fmt: skip
        points = {n for curve in curves for n, _ in curve.points}
        beside = [point for point in self.floor if point[0] in points]
        data = {
            "experts": self.experts,
            "tokens": self.tokens,
            "curves": [
                {"name": c.name, "points": list(c.points)}
                for c in (*curves, floor._replace(points=beside))
            ],
            "counts": [list(row) for row in self.counts],
        }
        about = " · ".join(f"<span>{escape(f'{n} {v}')}</span>" for n, v in self.facts[1:6])
        return document(
            f"{self.title}: expert caching",
            f'<h1>{escape(self.title)}</h1><p class="about">{about}</p>'
            f"{self._tiles()}{''.join(sections)}",
            '<div class="tip" role="status"></div>'
            f'<script type="application/json" id="data">{_json(data)}</script>'
            f"<script>\n{_asset('report.js')}</script>",
        )

    def _curves(self) -> list[Curve]:
        """In the order of the table's first appearance, so that colours follow the command."""
        return [Curve(name, points, i) for i, (name, points) in enumerate(self.curves.items())]

    @property
    def _ahead(self) -> bool:
        """Whether anything was prefetched."""
        return any("prefetches" in row for row in self.rows)

    def _times(self) -> list[str]:
        """What a token takes in each cell, where prefetching is compared."""
        if not self._ahead or all(row["tpot_s"] is None for row in self.rows):
            return []
        colours = list(self.curves)
        drawn = [
            Bar(
                _name(row),
                f"{self._share(row['capacity'])} ({row['capacity']:,} experts)",
                row["tpot_s"],
                row["tpot_p95_s"],
                show_time(row["tpot_s"]),
                colours.index(row["policy"]),
                "prefetches" not in row,
            )
            for row in sorted(self.rows, key=lambda row: int(row["capacity"]))
            if row["tpot_s"] is not None
        ]
        note = (
            "TPOT by capacity: the median, and a line at the 95th percentile. Pale: no prefetching."
        )
        return [card("Time of a token", note, bars(drawn))]

    def _share(self, capacity: int) -> str:
        return f"{100 * capacity / self.experts:.0f}\u00a0%"

    def _tiles(self) -> str:
        """The best cell at the middle one of the capacities, and what is left to gain."""
        asked = sorted({row["capacity"] for row in self.rows})
        capacity = asked[(len(asked) - 1) // 2]
        there = [row for row in self.rows if row["capacity"] == capacity]
        at = f"at {self._share(capacity)} ({capacity:,} experts)"
        tiles = [(f"{there[0]['requests']:,}", "requests")]
        if self._ahead:
            quickest = min(there, key=lambda row: float(row["seconds"]))
            tiles += [
                (_name(quickest), f"least time {at}"),
                (show_time(quickest["seconds"]), "its time there, of all requests"),
                (_percent(quickest["stall_s"] / (quickest["seconds"] or 1)), "of it stalled"),
            ]
        else:
            able = [row for row in there if row["policy"] != "opt"]  # it knows the future
            best = min(able or there, key=lambda row: float(row["miss_ratio"]))
            tiles += [
                (str(best["policy"]), f"fewest misses {at}"),
                (_percent(best["miss_ratio"]), "its miss ratio there"),
                (_percent(dict(self.floor)[capacity]), "OPT's, the floor, there"),
            ]
        return '<div class="tiles">' + "".join(
            f'<div class="tile"><b>{escape(value)}</b><span>{escape(text)}</span></div>'
            for value, text in tiles
        ) + "</div>"  # fmt: skip

    def _table(self) -> str:
        floor = dict(self.floor)
        rows: list[dict[str, Any]] = []
        for row in self.rows:
            least = floor[row["capacity"]] * row["requests"]
            above = row["misses"] / least - 1 if least else 0.0
            entry = {**row, "above": None if "prefetches" in row else above}
            entry["size"] = f"{row['capacity']:,} ({100 * row['capacity'] / self.experts:.0f} %)"
            if not self._ahead:
                entry.pop("prefetch", None)
            if row.get("seconds"):
                entry["stall_share"] = row["stall_s"] / row["seconds"]
            rows.append(entry)
        rows.sort(key=lambda row: row["capacity"])  # stable: policies as they were named
        columns = [each for each in COLUMNS if any(row.get(each[0]) is not None for row in rows)]
        best = {
            capacity: min(r["misses"] for r in rows if r["capacity"] == capacity)
            for capacity in {row["capacity"] for row in rows}
        }
        body, before = "", None
        for row in rows:
            new = ' class="new"' if before not in (None, row["capacity"]) else ""
            before = row["capacity"]
            cells = "".join(
                f"<td{' class=best' if key == 'miss_ratio' and won else ''}>"
                f"{'-' if row.get(key) is None else escape(show(row[key]))}</td>"
                for key, _, show in columns
                for won in [row["misses"] == best[row["capacity"]]]
            )
            body += f"<tr{new}>{cells}</tr>"
        head = "".join(f"<th>{escape(text)}</th>" for _, text, _ in columns)
        return (
            f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody>'
            "</table></div>"
        )


def _name(row: Mapping[str, Any]) -> str:
    """A cell's policy, and its predictor if it has one."""
    return f"{row['policy']} + {row['prefetch']}" if "prefetches" in row else str(row["policy"])


def show_time(seconds: float) -> str:
    """12.3 ms, 4.56 s."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:,.2f} s"


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"


def _above(share: float) -> str:
    return f"{100 * share:+.1f} %"


# Of the table: a field of a row, its title, and how it is shown.
COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("policy", "policy", str),
    ("prefetch", "prefetch", str),
    ("size", "capacity", str),
    ("miss_ratio", "miss ratio", _percent),
    ("above", "above floor", _above),
    ("ttft_s", "TTFT p50", show_time),
    ("tpot_s", "TPOT p50", show_time),
    ("tpot_p95_s", "TPOT p95", show_time),
    ("tokens_per_s", "tokens/s", _number),
    ("stall_share", "stalled", _percent),
    ("accuracy", "accuracy", _percent),
    ("goodpred", "GOODPRED", _percent),
    *((name, name, _number) for name in ("prefetches", "useful", "late", "wasted", "misses")),
)


def document(title: str, main: str, tail: str = "") -> str:
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


def table_rows(header: Sequence[str], *lines: Sequence[str]) -> str:
    """What is in a table: its header, and its lines."""

    def row(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    return row(header, "th") + "".join(row(line, "td") for line in lines)


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    return "<dl>" + "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts
    ) + "</dl>"  # fmt: skip


def _json(data: Any) -> str:
    """JSON that cannot end the script element that it is in."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
