"""What a machine can do and what limits it, in plain words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from greenroom.config import show_bytes
from greenroom.core.machine import Machine
from greenroom.plan.estimate import Estimate
from greenroom.plan.model import Model
from greenroom.plan.planner import Plan
from greenroom.sim.table import show_time

BUSY = 0.5  # of the cores: more load than that spoils a measurement


def machine_summary(machine: Machine) -> list[str]:
    """Sentences, the most important first."""
    host, link = machine.host, machine.routes[0].link
    processor = machine.processors[0]
    size = processor.expert.nbytes[len(processor.expert.nbytes) // 2]
    carried, computed = size / link.bandwidth, processor.expert.at(size).seconds(1)
    times = carried / computed
    lines = [
        f"An expert of {show_bytes(size)} is computed in {show_time(computed)} where it is in"
        f" memory; from the {machine.routes[0].source} it comes in {show_time(carried)},"
        f" {times:.3g} times as long."
    ]
    if times > 2:
        lines.append(
            "So the disk limits models that do not fit: what helps most is memory for experts, then"
            " smaller experts (a quantised checkpoint, greenroom pack)."
        )
    else:
        lines.append(
            "So the disk nearly keeps up: fetching ahead can hide most of what does not fit, and"
            " computing limits."
        )
    if "1" in (memory := machine.measured.get("memory", {})):
        best = max(float(rate) for rate in memory.values())
        lines.append(
            f"Memory delivers {best / 1e9:.1f} GB/s: a token that reads 1 GB of weights takes"
            f" {show_time(1e9 / best)} at least."
        )
    if (device := machine.measured.get("device")) is not None:
        lines.append(_of_device(device, size))
    if available := host.get("available_bytes"):
        lines.append(
            f"{show_bytes(available)} of {show_bytes(host['memory_bytes'])} of memory were free."
        )
    if was_under_load(machine):
        lines.append(
            f"The load was {host['load']:.1f} on {host['cores']} cores: others were at work, and"
            " these figures are too low. Measure again on a quiet machine."
        )
    return lines


def was_under_load(machine: Machine) -> bool:
    """Whether others were at work while the machine was measured."""
    host = machine.host
    return bool(host.get("load", 0.0) > BUSY * (host.get("cores") or 1))


def _of_device(device: Mapping[str, Any], size: int) -> str:
    """What a GPU has, and how long an expert takes to come to it."""
    pinned = device["pinned"]
    rate = device["pageable"] if pinned is None else pinned
    how = (
        f"host memory cannot be pinned ({device['unpinned']}), which slows every transfer"
        if pinned is None
        else f"pinned, {pinned / device['pageable']:.1f} times as fast as without"
    )
    return (
        f"{device['name']} has {show_bytes(device['memory_bytes'])} of memory at"
        f" {device['memory'] / 1e9:.0f} GB/s; from host memory an expert of {show_bytes(size)}"
        f" comes in {show_time(size / rate)}: {how}."
    )


def model_summary(model: Model, available: int) -> list[str]:
    """Whether it fits, and at which budget. `available` is what this machine has now, in bytes."""
    full, least = model.memory(model.experts), model.least_memory
    return [
        f"{model.name}: {model.experts:,} experts in {model.layers} layers, top-{model.top_k},"
        f" {show_bytes(model.experts * model.slot_bytes)} of them;"
        f" {show_bytes(model.dense_bytes)} of dense parts.",
        f"It runs with {show_bytes(least)} of memory and more; with {show_bytes(full)} all of it"
        f" is in memory. {show_bytes(available)} are there now:" + _fits(available, least, full),
    ]


def _fits(available: int, least: int, full: int) -> str:
    if available >= full:
        return " all of it fits."
    if available >= least:
        return " it runs, and experts that do not fit wait on disk."
    return f" it does not fit; {show_bytes(least - available)} more are needed."


def bottleneck(plan: Plan) -> str:
    """What a token of the chosen settings waits for."""
    best = plan.best
    if best.stall < 0.1:
        return "A token computes nearly all of its time: a faster processor is what would help."
    return (
        f"A token waits {best.stall:.0%} of its time for experts ({best.miss_ratio:.0%} of them are"
        f" missed, {show_bytes(best.token_bytes)} read a token): more memory or a faster disk help."
    )


def curve_row(estimate: Estimate) -> tuple[str, ...]:
    """A row of the curve: memory, experts in it, TPOT, its range, tokens a second, TTFT."""
    return (
        show_bytes(estimate.memory),
        f"{estimate.capacity:,}",
        show_time(estimate.tpot),
        f"{show_time(estimate.low)} to {show_time(estimate.high)}",
        f"{1 / estimate.tpot:.3g}",
        show_time(estimate.ttft),
    )


def comparison_row(estimate: Estimate) -> tuple[str, ...]:
    """A row of the settings that were compared: flags, TPOT, its range, misses, bytes read."""
    return (
        estimate.setting.flags(),
        show_time(estimate.tpot),
        f"{show_time(estimate.low)} to {show_time(estimate.high)}",
        f"{estimate.miss_ratio:.1%}",
        show_bytes(estimate.token_bytes),
    )


COMPARISON_HEADER = ("settings", "TPOT", "range", "miss ratio", "read a token")
CURVE_HEADER = ("memory", "experts in it", "TPOT", "range", "tokens/s", "TTFT")
