"""Draws the three pictures of docs/how-it-works.md.

python docs/figures/diagrams.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
WIDTH, HEIGHT = 150, 52  # of a box
GAP_X, GAP_Y = 62, 44
STYLE = """
  text { font: 12px 'DejaVu Sans', sans-serif; fill: #222; text-anchor: middle }
  .small { font-size: 10px; fill: #555 }
  .label { font-size: 10px; fill: #444; paint-order: stroke; stroke: #fff; stroke-width: 5px }
  .box { fill: #eef4fb; stroke: #0072b2; stroke-width: 1.2 }
  .core { fill: #fdf1e3; stroke: #d55e00 }
  .disk { fill: #f1f1f1; stroke: #777 }
  .arrow { fill: none; stroke: #444; stroke-width: 1.3; marker-end: url(#head) }
  .page { fill: #fff }
"""


class Box(NamedTuple):
    """A box at a column and a row, with a title and a line below it."""

    column: float
    row: float
    title: str
    text: str = ""
    kind: str = ""

    @property
    def middle(self) -> tuple[float, float]:
        return (
            20 + self.column * (WIDTH + GAP_X) + WIDTH / 2,
            20 + self.row * (HEIGHT + GAP_Y) + HEIGHT / 2,
        )


def edge(box: Box, towards: tuple[float, float]) -> tuple[float, float]:
    """The point of a box's border on the line from its middle."""
    x, y = box.middle
    dx, dy = towards[0] - x, towards[1] - y
    scale = min(
        (WIDTH / 2 + 3) / abs(dx) if dx else float("inf"),
        (HEIGHT / 2 + 3) / abs(dy) if dy else float("inf"),
    )
    return x + dx * scale, y + dy * scale


def draw(name: str, boxes: dict[str, Box], arrows: list[tuple[str, str, str]]) -> None:
    """Write NAME.svg: boxes, and arrows (from, to, label)."""
    width = 40 + max(b.column for b in boxes.values()) * (WIDTH + GAP_X) + WIDTH
    height = 40 + max(b.row for b in boxes.values()) * (HEIGHT + GAP_Y) + HEIGHT
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}"'
        f' width="{width:g}" height="{height:g}">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
        ' markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#444"/></marker></defs>',
        f'<rect class="page" width="{width:g}" height="{height:g}"/>',
    ]
    for start, end, label in arrows:
        one, two = boxes[start], boxes[end]
        (x1, y1), (x2, y2) = edge(one, two.middle), edge(two, one.middle)
        out.append(f'<path class="arrow" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>')
        if label:
            level = abs(y1 - y2) < 1
            upright = abs(x1 - x2) < 1
            x, y = (x1 + x2) / 2 + (6 if upright else 0), (y1 + y2) / 2 + (-6 if level else 4)
            anchor = ' style="text-anchor:start"' if upright else ""
            out.append(
                f'<text class="label" x="{x:.1f}" y="{y:.1f}"{anchor}>{escape(label)}</text>'
            )
    for box in boxes.values():
        x, y = box.middle
        out.append(
            f'<rect class="box {box.kind}" x="{x - WIDTH / 2:g}" y="{y - HEIGHT / 2:g}"'
            f' width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
            f'<text x="{x:g}" y="{y - 3 if box.text else y + 4:g}">{escape(box.title)}</text>'
        )
        if box.text:
            out.append(f'<text class="small" x="{x:g}" y="{y + 14:g}">{escape(box.text)}</text>')
    (FOLDER / f"{name}.svg").write_text("\n".join([*out, "</svg>", ""]))


def path_of_a_token() -> None:
    draw(
        "path-of-a-token",
        {
            "attention": Box(0, 0, "attention, router", "dense parts, in memory"),
            "scheduler": Box(1, 0, "scheduler", "which expert, which slot", "core"),
            "experts": Box(2.4, 0, "experts", "computed from slots"),
            "sum": Box(3.4, 0, "sum", "in a fixed order"),
            "predictor": Box(0, 1, "predictor", "experts of later layers", "core"),
            "transfers": Box(1, 1, "transfer queue", "demand before prefetch", "core"),
            "slots": Box(2.4, 1, "slots", "experts in memory"),
            "disk": Box(1, 2, "checkpoint on disk", "read in place", "disk"),
        },
        [
            ("attention", "scheduler", "top-k"),
            ("scheduler", "experts", "compute these"),
            ("experts", "sum", ""),
            ("attention", "predictor", ""),
            ("predictor", "transfers", "prefetch"),
            ("scheduler", "transfers", "misses"),
            ("transfers", "slots", "chunks"),
            ("slots", "experts", ""),
            ("disk", "transfers", "direct reads"),
        ],
    )


def path_of_a_request() -> None:
    draw(
        "path-of-a-request",
        {
            "client": Box(0, 0, "HTTP client", "", "disk"),
            "http": Box(1, 0, "server/http, api", "checks, chat template"),
            "queue": Box(2, 0, "admission", "a place and memory"),
            "batch": Box(3, 0, "batch", "one pass for all requests", "core"),
            "model": Box(3, 1, "model pass", "experts fetched once"),
            "sampler": Box(2, 1, "sampler", "grammar, stop tokens"),
            "reader": Box(1, 1, "decoded text", "reasoning, tool calls"),
            "stream": Box(0, 1, "events", "SSE or one answer"),
        },
        [
            ("client", "http", ""),
            ("http", "queue", ""),
            ("queue", "batch", ""),
            ("batch", "model", ""),
            ("model", "sampler", "logits"),
            ("sampler", "reader", "tokens"),
            ("reader", "stream", ""),
            ("stream", "client", ""),
        ],
    )


def life_of_a_slot() -> None:
    draw(
        "life-of-a-slot",
        {
            "free": Box(0, 1, "free", "memory not used yet", "disk"),
            "filling": Box(1.1, 0, "filling", "a miss: demand read"),
            "borrowed": Box(1.1, 2, "borrowed", "a prefetch: early read"),
            "pinned": Box(2.2, 1, "pinned", "its step is computed", "core"),
            "resident": Box(3.6, 1, "resident", "ranked by the cache policy", "core"),
        },
        [
            ("free", "filling", "a miss"),
            ("free", "borrowed", ""),
            ("borrowed", "free", "not used"),
            ("filling", "pinned", "bytes arrived"),
            ("borrowed", "pinned", "used by a step"),
            ("pinned", "resident", "step is over"),
            ("resident", "filling", "victim of a miss"),
            ("resident", "borrowed", "victim of a prefetch"),
        ],
    )


if __name__ == "__main__":
    path_of_a_token()
    path_of_a_request()
    life_of_a_slot()
