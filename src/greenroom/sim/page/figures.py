"""Charts of a simulation's HTML report: SVG drawings with HTML labels.

A drawing is stretched to the width of the page, with lines of constant width. Labels are HTML
elements at percentages of the drawing, so that letters have the same size on a telephone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

COLOURS = 8  # --c0 .. in drawing.css; further curves are dashed
DASHES = ("", "6 5", "1 5")
WIDE, HIGH = 1000, 500

Points = Sequence[tuple[int, float]]


class PlottedCurve(NamedTuple):
    """A curve in a chart of miss ratios by cache capacity.

    points: (capacity in slots, miss ratio)
    style:  number that selects colour and dashes; -1 for the lower bound of all policies
    """

    name: str
    points: Points
    style: int


def style(number: int) -> str:
    """Return the SVG attributes for the stroke of a chart's curve, by the curve's number."""
    if number < 0:
        return 'class="curve opt" stroke-dasharray="2 4"'
    dash = DASHES[number // COLOURS % len(DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'class="curve" stroke="var(--c{number % COLOURS})"{dashed}'


def legend(curves: Sequence[PlottedCurve]) -> str:
    """Return a chart's legend as HTML: a sample of each curve and its name."""
    items = (
        '<li><svg viewBox="0 0 26 12" aria-hidden="true">'
        f'<path d="M1 6H25" {style(c.style)}/></svg>{escape(c.name)}</li>'
        for c in curves
    )
    return f'<ul class="curves">{"".join(items)}</ul>'


def miss_ratio_chart(curves: Sequence[PlottedCurve], floor: PlottedCurve, experts: int) -> str:
    """Return a chart of miss ratio over cache capacity, as HTML with SVG.

    `floor` is the curve that no policy can get below. `experts` is the number of all experts, which
    is the largest capacity.
    """
    highest = max(y for c in (*curves, floor) for _, y in c.points)
    step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2) if highest / s <= 6 or s == 0.2)
    top = max(step, math.ceil(round(highest / step, 9)) * step)
    ticks = [i * step for i in range(round(top / step) + 1)]

    def at(point: tuple[int, float]) -> str:
        return f"{point[0] / experts * WIDE:.1f} {HIGH - point[1] / top * HIGH:.1f}"

    def line(points: Points) -> str:
        return "M" + "L".join(at(point) for point in points)

    first, last = floor.points[0][0], floor.points[-1][0]
    parts = [
        f'<path class="floor" d="{line(floor.points)}L{at((last, 0))}L{at((first, 0))}Z"/>',
        *(f'<path class="grid" vector-effect="non-scaling-stroke" d="M{at((0, y))}H{WIDE}"/>'
          for y in ticks[1:]),
    ]  # fmt: skip
    for curve in (floor, *reversed(curves)):
        parts.append(f'<path {style(curve.style)} d="{line(curve.points)}"/>')
        if curve.style >= 0:
            dots = "".join(f"M{at(point)}h0" for point in curve.points)
            colour = f"var(--c{curve.style % COLOURS})"
            parts.append(f'<path class="dot" stroke="{colour}" d="{dots}"/>')
    described = f"Miss ratio over capacity of {', '.join(c.name for c in curves)}"
    digits = 0 if step >= 0.01 else 1
    return plot(
        "".join(parts),
        described,
        [(y / top, f"{100 * y:.{digits}f} %") for y in ticks],
        [(p / 100, f"{p} %") for p in range(0, 101, 10)],
        f"capacity, of {experts:,} experts",
    )


Labels = Sequence[tuple[float, str]]


def plot(drawn: str, described: str, ys: Labels, xs: Labels, axis: str) -> str:
    """Return a chart as HTML: an SVG drawing of 1000 x 500 units with axis labels.

    drawn:     content of the SVG element
    described: description for screen readers
    ys, xs:    (position as a share of the axis, text) of each label
    axis:      name of the horizontal axis
    """
    y_labels = "".join(f'<span style="bottom:{100 * y:.2f}%">{label}</span>' for y, label in ys)
    x_labels = "".join(
        f'<span style="left:{100 * x:.2f}%"{" class=odd" if i % 2 else ""}>{label}</span>'
        for i, (x, label) in enumerate(xs)
    )
    return (
        f'<div class="chart"><div class="y">{y_labels}</div>'
        f'<div class="plot"><svg viewBox="0 0 {WIDE} {HIGH}" preserveAspectRatio="none" role="img"'
        f' aria-label="{escape(described)}">{drawn}</svg><div class="cursor"></div></div>'
        f'<div class="x">{x_labels}</div><div class="axis">{axis}</div></div>'
    )


class Bar(NamedTuple):
    """One bar of a chart: a simulated time and its 95th percentile, in seconds.

    name:  text beside the bar
    group: heading that the bar stands under
    label: the time as text
    style: number of the colour
    pale:  whether the bar is pale
    """

    name: str
    group: str
    seconds: float
    p95: float
    label: str
    style: int
    pale: bool


def bar_chart(drawn: Sequence[Bar]) -> str:
    """Return a bar chart as HTML: bars under the headings of their groups, on one scale."""
    longest = max(max(bar.seconds, bar.p95) for bar in drawn) or 1.0
    parts, group = [], None
    for bar in drawn:
        if bar.group != group:
            group = bar.group
            parts.append(f'<div class="group">{escape(group)}</div>')
        pale = " class=pale" if bar.pale else ""
        parts.append(
            f'<div>{escape(bar.name)}</div><div class="bar"><i{pale} style="width:'
            f'{100 * bar.seconds / longest:.2f}%;background:var(--c{bar.style % COLOURS})"></i>'
            f'<b style="left:{100 * bar.p95 / longest:.2f}%"></b></div>'
            f'<div class="much">{escape(bar.label)}</div>'
        )
    return f'<div class="bars">{"".join(parts)}</div>'
