"""The HTML report of `greenroom plan`: one file without external resources."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from greenroom.config import show_bytes
from greenroom.plan.estimate import Estimate
from greenroom.plan.planner import Plan, Target
from greenroom.plan.summary import COMPARISON_HEADER, CURVE_HEADER, comparison_row, curve_row
from greenroom.sim.page.figures import HIGH, WIDE, plot
from greenroom.sim.page.report import card, html_page, provenance_card, scrollable
from greenroom.sim.table import html_table, show_time


def plan_page(title: str, facts: Sequence[tuple[str, str]], plan: Plan, command: str) -> str:
    """Build the HTML report of `greenroom plan`, and return the page.

    `facts` describe the model, machine and workload as pairs of a name and a text; `command` is the
    command line that made the plan.
    """
    sections = [
        card("Recommended settings", "", _flags(plan.best)),
        card("Time per token by memory", "", _curve(plan)),
        card(
            "Settings compared",
            "",
            scrollable(html_table(COMPARISON_HEADER, list(map(comparison_row, plan.compared)))),
        ),
        provenance_card(command, facts),
    ]
    if plan.target is not None:
        sections.insert(1, card("Target", "", f"<p>{escape(target_message(plan.target))}</p>"))
    return html_page(f"{title}: plan", f"<h1>{escape(title)}</h1>{''.join(sections)}")


def target_message(target: Target) -> str:
    """Describe whether a plan reaches its target time per output token (TPOT)."""
    target_time = show_time(target.seconds)
    if target.blocked is not None:
        return (
            f"a TPOT of {target_time} is out of reach: {target.blocked}; the nearest TPOT is"
            f" {show_time(target.nearest.tpot)} with {show_bytes(target.nearest.memory)} of memory"
        )
    assert target.least is not None
    return (
        f"a TPOT of {target_time} needs at least {show_bytes(target.least.memory)} of memory"
        f" ({target.least.capacity:,} experts in memory)"
    )


def _flags(best: Estimate) -> str:
    between = f"{show_time(best.low)} to {show_time(best.high)}"
    return (
        f"<pre>{escape(best.setting.flags())}</pre>"
        f"<p>Time per output token (TPOT) {show_time(best.tpot)} ({between});"
        f" {best.miss_ratio:.1%} of expert requests miss;"
        f" {show_bytes(best.token_bytes)} are read for each token</p>"
    )


def _curve(plan: Plan) -> str:
    """Draw a chart of TPOT over memory: the range shaded, budget and target as lines."""
    points = plan.curve
    left, right = points[0].memory, points[-1].memory
    top = 1.05 * max(point.high for point in points)

    def x(memory: float) -> float:
        return WIDE * (memory - left) / max(1, right - left)

    def y(seconds: float) -> float:
        return HIGH * (1 - seconds / top)

    def line(values: Sequence[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{x(m):.1f} {y(s):.1f}" for m, s in values)

    ups = [(p.memory, p.high) for p in points]
    downs = [(p.memory, p.low) for p in reversed(points)]
    middle = [(p.memory, p.tpot) for p in points]
    still = 'vector-effect="non-scaling-stroke"'
    marks = f'<path class="grid" {still} d="M{x(plan.memory):.1f} 0V{HIGH}"/>' * (
        left <= plan.memory <= right
    )
    if plan.target is not None and plan.target.seconds <= top:
        marks += f'<path class="grid" {still} d="M0 {y(plan.target.seconds):.1f}H{WIDE}"/>'
    drawn = (
        f'<path class="floor" d="{line(ups)}L{line(downs)[1:]}Z"/>{marks}'
        f'<path class="curve" stroke="var(--c0)" d="{line(middle)}"/>'
    )
    quarters = [i / 4 for i in range(5)]
    return plot(
        drawn,
        "Time per output token over memory",
        [(share, show_time(top * share) if share else "0") for share in quarters],
        [(share, show_bytes(left + (right - left) * share)) for share in quarters],
        "memory (shaded: the range in which a measurement is expected)",
    ) + _points(points)


def _points(points: Sequence[Estimate]) -> str:
    rows = [(*curve_row(p)[:4], f"{p.miss_ratio:.1%}") for p in points]
    return scrollable(html_table((*CURVE_HEADER[:4], "miss ratio"), rows))
