"""The result of `greenroom plan`, settings and speeds, as text and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from greenroom.config import format_amount, show_bytes
from greenroom.sim.table import show_time, text_table

if TYPE_CHECKING:
    from greenroom.core.machine import Machine, Processor
    from greenroom.plan.estimate import Estimate
    from greenroom.plan.model import Model
    from greenroom.plan.planner import Plan
    from greenroom.plan.workload import Workload


def facts_of(
    model: Model,
    machine: Machine,
    workload: Workload,
    local: bool,
    measured: int,
    plan: Plan,
    processor: Processor,
) -> list[tuple[str, str]]:
    """Describe the model, machine, routing and cache slots of a plan.

    Returns pairs of a name and a text. `local` says whether the machine is this one, `measured` is
    the number of runs that calibrated the plan.
    """
    from greenroom.core.machine import machine_name
    from greenroom.plan.summary import was_under_load

    whose = "this one" if local else "another machine than this one"
    runs = f", and {measured} runs of this model on it" * bool(measured)
    runs += f"; {processor.name} computes" * (len(machine.processors) > 1)
    runs += (
        "; other programs ran during its measurement: run `greenroom doctor` again"
        * was_under_load(machine)
    )
    full = model.slots_when_full(plan.memory)
    slots = f"{plan.capacity:,} experts" + (
        f", {full:,} with a full context of {model.context:,} tokens"
        if full < plan.capacity else ""
    )  # fmt: skip
    return [
        ("model", f"{model.experts:,} experts in {model.layers} layers, top-{model.top_k};"
                  f" {show_bytes(model.expert_bytes)} each"),
        ("machine", f"{machine_name(machine.host)} ({whose}){runs}"),
        ("routing", workload.description),
        ("slots", slots),
    ]  # fmt: skip


def shown(plan: Plan, facts: list[tuple[str, str]], source: str, options: str = "") -> str:
    """Format a plan's best setting and expected speed as text.

    `facts` describe the plan as pairs of a name and a text, `source` is the model as the user named
    it, and `options` are options of the recommended run besides --memory and the setting.
    """
    from greenroom.plan.page import target_message
    from greenroom.plan.summary import COMPARISON_HEADER, bottleneck, comparison_row

    best = plan.best
    lines = [f"{name}: {value}" for name, value in facts]
    lines += [
        "",
        text_table(COMPARISON_HEADER, list(map(comparison_row, plan.compared))),
        "",
        shown_curve(plan.curve),
        "",
    ]
    if plan.target is not None:
        lines.append(target_message(plan.target))
    size = format_amount(plan.memory * 9999 // 10000, plan.memory)
    run = f"greenroom run {shlex.quote(source)} --memory {size}{options}"
    lines += [
        bottleneck(plan),
        f"recommended: {run} {best.setting.flags()}",
        f"TPOT {show_time(best.tpot)} ({show_time(best.low)} to {show_time(best.high)})"
        + ("" if plan.overrides_default else ", the defaults for this --memory"),
    ]
    if best.ttft is not None:
        low, high = best.ttft_range
        lines.append(f"TTFT {show_time(best.ttft)} ({show_time(low)} to {show_time(high)})")
    return "\n".join(lines)


def shown_curve(points: Sequence[Estimate]) -> str:
    """Format estimated speeds as a table, one line for each memory budget."""
    from greenroom.plan.summary import CURVE_HEADER, curve_row

    return text_table(CURVE_HEADER, [curve_row(point) for point in points], left=0)


def as_json(plan: Plan, facts: list[tuple[str, str]], source: str) -> dict[str, Any]:
    """Return the object that `greenroom plan --json` prints.

    `facts` describe the plan as pairs of a name and a text, `source` is the model's name.
    """
    target = plan.target
    return {
        "model": source,
        **dict(facts[1:]),
        "memory": plan.memory,
        "capacity": plan.capacity,
        "best": plan.best.as_json(),
        "sure": plan.overrides_default,
        "compared": [estimate.as_json() for estimate in plan.compared],
        "curve": [{"memory": p.memory, **p.as_json()} for p in plan.curve],
        "target": None if target is None else {
            "tpot_s": target.seconds,
            "memory": None if target.least is None else target.least.memory,
            "blocked": target.blocked,
            "nearest_tpot_s": target.nearest.tpot,
            "nearest_memory": target.nearest.memory,
        },
    }  # fmt: skip
