"""Statistics of a run or a server, as lines for people."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from greenroom.config import show_bytes

if TYPE_CHECKING:
    from greenroom.runtime.driver.stats import Stats


def summary(stats: dict[str, Any]) -> str:
    """Format a server's statistics, as from `/v1/stats`, as lines for the terminal chat.

    Statistics of a server that is not Greenroom's are formatted as JSON.
    """
    try:
        return "\n".join(_lines(stats))
    except (KeyError, TypeError, ValueError, AttributeError):
        return json.dumps(stats, indent=2)


def _lines(stats: dict[str, Any]) -> list[str]:
    queue, tokens = stats["queue"], stats["tokens"]
    ended = ", ".join(f"{count} {reason}" for reason, count in stats["requests"].items())
    lines = [
        f"requests  {queue['running']} running, {queue['waiting']} waiting;"
        f" ended: {ended or 'none'}",
        f"tokens    {tokens['prompt']:,} of prompts ({tokens['reused']:,} reused),"
        f" {tokens['new']:,} new",
    ]
    if "experts" in stats:
        lines += _of_model(stats)
    return lines


def inexact_line(counts: dict[str, Any]) -> str:
    """Describe which shares of the expert evaluations were approximated, in words."""
    named = (("low", f"in {counts['precision']}"), ("skipped", "left out"),
             ("substituted", "replaced"), ("rerouted", "rerouted"))  # fmt: skip
    shares = [f"{counts[f'{name}_share'] or 0:.1%} {what}" for name, what in named if counts[name]]
    return f"{', '.join(shares) or 'none'} of the expert evaluations"


def co_compute_line(counts: dict[str, Any]) -> str:
    """Describe how many missing experts the host computed or the device got."""
    return (
        f"{counts['on_host']:,} computed in host memory ({counts['on_host_share'] or 0:.1%}),"
        f" {counts['moved']:,} moved to the device"
    )


def pressure_line(counts: dict[str, Any]) -> str:
    """Describe how much memory the expert cache gave back, and why."""
    times = "once" if counts["shrinks"] == 1 else f"{counts['shrinks']:,} times"
    return f"{show_bytes(counts['released_bytes'])} given back ({times}): {counts['cause']}"


def prefetched(stats: Stats) -> list[str]:
    """Return a list with one text that counts prefetches; empty if there were none."""
    counts = stats.prefetch
    if not counts["began"]:
        return []
    late = f", {counts['late']:,} late" if counts["late"] else ""
    return [f"{counts['useful']:,} of {counts['began']:,} prefetches used{late}"]


def _of_model(stats: dict[str, Any]) -> list[str]:
    memory, experts, kv = stats["memory"], stats["experts"], stats["kv"]
    budget = memory["budget_bytes"]
    limit = f" of {show_bytes(budget)} budget" if budget else ""
    prefetches = stats["prefetch"]
    idle = ""
    if prefetches.get("idle"):
        idle = f"; {prefetches['idle']:,} read while idle, {prefetches['idle_used']:,} of them used"
    links = ", ".join(f"{link['link']} {show_bytes(link['bytes'])}" for link in stats["links"])
    approximated, co_computed = stats.get("approximated"), stats.get("co_compute")
    misses = [f"inexact   {inexact_line(approximated)}"] if approximated else []
    misses += [f"misses    {co_compute_line(co_computed)}"] if co_computed else []
    pressure = stats.get("pressure")
    given_back = []
    if pressure and pressure["shrinks"]:
        given_back = [f"pressure  {pressure_line(pressure)}"]
    return [
        f"experts   {memory['slots']:,} of {memory['experts']:,} in slots"
        f" ({show_bytes(memory['resident_bytes'])}), hit ratio {experts['hit_ratio']:.1%},"
        f" policy {experts['policy']}",
        *given_back,
        *misses,
        f"prefetch  {prefetches['predictor']}: {prefetches['useful']:,} useful,"
        f" {prefetches['late']:,} late, {prefetches['wasted']:,} wasted{idle}",
        f"links     {links or 'none'}; stalled {stats['stall_s']:.2f} s",
        f"memory    {show_bytes(memory['process_bytes'])}{limit}; KV cache"
        f" {show_bytes(kv['reserved_bytes'])} of {show_bytes(kv['limit_bytes'])}",
    ]
