"""Descriptions of machines, models and plans in plain language."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from greenroom.config import show_bytes
from greenroom.core.machine import Machine
from greenroom.plan.estimate import Estimate
from greenroom.plan.model import Model
from greenroom.plan.planner import Plan
from greenroom.sim.table import show_number, show_time

BUSY = 0.5  # share of the cores; a higher load spoils a measurement


def machine_summary(machine: Machine) -> list[str]:
    """Describe a machine's memory and speed in sentences, the most important first.

    The machine's profile comes from `greenroom doctor`.
    """
    host, link = machine.host, machine.routes[0].link
    processor = machine.processors[0]
    size = processor.expert.nbytes[len(processor.expert.nbytes) // 2]
    carried, computed = size / link.bandwidth, processor.expert.at(size).seconds(1)
    times = carried / computed
    lines = [
        f"Computing an expert of {show_bytes(size)} that is in memory takes {show_time(computed)};"
        f" loading it from the {machine.routes[0].source} takes {show_time(carried)},"
        f" {times:.3g} times as long."
    ]
    if times > 2:
        lines.append(
            "So the disk limits the speed of models that do not fit in memory: more memory helps"
            " most, then smaller experts (a quantised checkpoint, or greenroom pack)."
        )
    else:
        lines.append(
            "So the disk is nearly as fast as the processor: prefetching can hide most reads,"
            " and the"
            " processor limits the speed."
        )
    if "1" in (memory := machine.measured.get("memory", {})):
        best = max(float(rate) for rate in memory.values())
        lines.append(
            f"Memory delivers {best / 1e9:.1f} GB/s: a token that reads 1 GB of weights takes at"
            f" least {show_time(1e9 / best)}."
        )
    device = machine.measured.get("device")
    if device is not None and not machine.measured.get("predicted"):
        lines.append(_device_summary(device, size))
    if available := host.get("available_bytes"):
        lines.append(
            f"{show_bytes(available)} of {show_bytes(host['memory_bytes'])} of memory were free"
            " during"
            " the measurement."
        )
    if was_under_load(machine):
        lines.append(
            f"Other programs were running (load {host['load']:.1f} on {host['cores']} cores), so"
            " these speeds are too low: measure again when the machine is idle."
        )
    return lines


def was_under_load(machine: Machine) -> bool:
    """Check whether other programs were running while the machine was measured."""
    host = machine.host
    return bool(host.get("load", 0.0) > BUSY * (host.get("cores") or 1))


def _device_summary(device: Mapping[str, Any], size: int) -> str:
    """Describe a GPU's memory, and the time to load an expert into it."""
    pinned = device["pinned"]
    rate = device["pageable"] if pinned is None else pinned
    how = (
        f"host memory cannot be page-locked ({device['unpinned']}), which slows every transfer"
        if pinned is None
        else f"the host memory is page-locked, which is {pinned / device['pageable']:.1f} times"
        " as fast as"
        " pageable memory"
    )
    return (
        f"{device['name']} has {show_bytes(device['memory_bytes'])} of memory at"
        f" {device['memory'] / 1e9:.0f} GB/s; loading an expert of {show_bytes(size)} from host"
        f" memory takes {show_time(size / rate)}: {how}."
    )


def model_summary(model: Model, available: int) -> list[str]:
    """Describe a model, and whether it fits into the available bytes of memory."""
    full, least = model.memory(model.experts), model.least_memory
    return [
        f"{model.name}: {model.experts:,} experts in {model.layers} layers, top-{model.top_k},"
        f" {show_bytes(model.experts * model.slot_bytes)} in total;"
        f" {show_bytes(model.dense_bytes)} of other weights.",
        f"It needs at least {show_bytes(least)} of memory; {show_bytes(full)} hold all of it."
        f" {show_bytes(available)} are available now:" + _fit_sentence(available, least, full),
    ]


def _fit_sentence(available: int, least: int, full: int) -> str:
    if available >= full:
        return " all of it fits."
    if available >= least:
        return " it runs, and experts that do not fit are read from disk."
    return f" it does not fit; {show_bytes(least - available)} more are needed."


def bottleneck(plan: Plan) -> str:
    """Describe what limits the speed of a plan's best setting, in one sentence."""
    best = plan.best
    if best.stall < 0.1:
        return "Computing takes nearly all of a token's time: a faster processor would help."
    return (
        f"A token spends {best.stall:.0%} of its time waiting for experts ({best.miss_ratio:.0%} of"
        f" requests miss, {show_bytes(best.token_bytes)} are read for each token): more memory or"
        " a faster disk would help."
    )


def curve_row(estimate: Estimate) -> tuple[str, ...]:
    """Format one row of the table of TPOT over memory, which CURVE_HEADER heads."""
    return (
        show_bytes(estimate.memory),
        f"{estimate.capacity:,}",
        show_time(estimate.tpot),
        f"{show_time(estimate.low)} to {show_time(estimate.high)}",
        show_number(1 / estimate.tpot),
        show_time(estimate.ttft),
    )


def comparison_row(estimate: Estimate) -> tuple[str, ...]:
    """Format one row of the table of compared settings, which COMPARISON_HEADER heads."""
    return (
        estimate.setting.flags(),
        show_time(estimate.tpot),
        f"{show_time(estimate.low)} to {show_time(estimate.high)}",
        f"{estimate.miss_ratio:.1%}",
        show_bytes(estimate.token_bytes),
    )


COMPARISON_HEADER = ("settings", "TPOT", "range", "miss ratio", "read per token")
CURVE_HEADER = ("memory", "experts in it", "TPOT", "range", "tokens/s", "TTFT")
