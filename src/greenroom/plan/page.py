"""The report of a plan: one HTML page that is complete in itself, with the curve as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from greenroom.config import show_bytes
from greenroom.plan.estimate import Estimate
from greenroom.plan.planner import Plan, Point, Target
from greenroom.plan.words import HEADER, line_of
from greenroom.sim.report import card, document, show_time, table_rows

WIDE, HIGH = 1000, 500


def page(title: str, facts: Sequence[tuple[str, str]], plan: Plan, command: str) -> str:
    """`facts` are (name, value) of model, machine and evidence."""
    sections = [
        card("Take", "", _flags(plan.best)),
        card("Speed against memory", "", _curve(plan)),
        card("What was compared", "", _table(plan.compared)),
        card("Made by", "", f"<pre>{escape(command)}</pre>{_facts(facts)}"),
    ]
    if plan.target is not None:
        sections.insert(1, card("Target", "", f"<p>{escape(said(plan.target))}</p>"))
    return document(f"{title}: plan", f"<h1>{escape(title)}</h1>{''.join(sections)}")


def said(target: Target) -> str:
    """What became of a target, in one line."""
    asked = show_time(target.seconds)
    if target.blocked is not None:
        return (
            f"a TPOT of {asked} is out of reach: {target.blocked}; the nearest is"
            f" {show_time(target.nearest.estimate.tpot)} with {show_bytes(target.nearest.memory)}"
        )
    assert target.least is not None
    return (
        f"a TPOT of {asked} takes at least {show_bytes(target.least.memory)}"
        f" ({target.least.estimate.capacity:,} experts in memory)"
    )


def _flags(best: Estimate) -> str:
    between = f"{show_time(best.low)} to {show_time(best.high)}"
    return (
        f"<pre>{escape(best.setting.flags())}</pre><p>TPOT {show_time(best.tpot)} ({between}),"
        f" {best.miss_ratio:.1%} of the experts missed, {show_bytes(best.token_bytes)} read a"
        " token</p>"
    )


def _curve(plan: Plan) -> str:
    """TPOT over memory, its range shaded, the budget and the target as lines."""
    points = plan.curve
    left, right = points[0].memory, points[-1].memory
    top = 1.05 * max(point.estimate.high for point in points)

    def x(memory: float) -> float:
        return WIDE * (memory - left) / max(1, right - left)

    def y(seconds: float) -> float:
        return HIGH * (1 - seconds / top)

    def line(values: Sequence[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{x(m):.1f} {y(s):.1f}" for m, s in values)

    ups = [(p.memory, p.estimate.high) for p in points]
    downs = [(p.memory, p.estimate.low) for p in reversed(points)]
    middle = [(p.memory, p.estimate.tpot) for p in points]
    still = 'vector-effect="non-scaling-stroke"'
    marks = f'<path class="grid" {still} d="M{x(plan.memory):.1f} 0V{HIGH}"/>' * (
        left <= plan.memory <= right
    )
    if plan.target is not None and plan.target.seconds <= top:
        marks += f'<path class="grid" {still} d="M0 {y(plan.target.seconds):.1f}H{WIDE}"/>'
    shown = range(5)
    y_labels = "".join(
        f'<span style="bottom:{25 * i}%">{show_time(top * i / 4) if i else 0}</span>' for i in shown
    )
    x_labels = "".join(
        f'<span style="left:{25 * i}%">{show_bytes(left + (right - left) * i / 4)}</span>'
        for i in shown
    )
    return (
        f'<div class="chart"><div class="y">{y_labels}</div><div class="plot">'
        f'<svg viewBox="0 0 {WIDE} {HIGH}" preserveAspectRatio="none" role="img"'
        ' aria-label="Time a token over memory">'
        f'<path class="floor" d="{line(ups)}L{line(downs)[1:]}Z"/>{marks}'
        f'<path class="curve" stroke="var(--c0)" d="{line(middle)}"/></svg></div>'
        f'<div class="x">{x_labels}</div><div class="axis">memory; the shaded range is where a'
        " measurement is expected</div></div>" + _points(points)
    )


def _points(points: Sequence[Point]) -> str:
    rows = [(*line_of(p)[:4], f"{p.estimate.miss_ratio:.1%}") for p in points]
    return _rows((*HEADER[:4], "miss ratio"), rows)


def _table(compared: Sequence[Estimate]) -> str:
    rows = [
        (e.setting.flags(), show_time(e.tpot), f"{show_time(e.low)} to {show_time(e.high)}",
         f"{e.miss_ratio:.1%}", show_bytes(e.token_bytes))
        for e in compared
    ]  # fmt: skip
    return _rows(("settings", "TPOT", "range", "miss ratio", "read a token"), rows)


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f'<div class="wide"><table>{table_rows(header, *rows)}</table></div>'


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    return _rows(("", ""), facts)
