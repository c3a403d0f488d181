"""A server's statistics in a few lines, for people."""

from __future__ import annotations

import json
from typing import Any

from greenroom.config import show_bytes


def summary(stats: dict[str, Any]) -> str:
    """What `/v1/stats` says of a Greenroom; of any other server, what it says."""
    if not {"queue", "tokens"} <= stats.keys():
        return json.dumps(stats, indent=2)
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
    return "\n".join(lines)


def inexact_line(lesser: dict[str, Any]) -> str:
    """How much was not computed exactly, for people."""
    named = (("low", f"in {lesser['precision']}"), ("left_out", "left out"),
             ("substituted", "replaced"))  # fmt: skip
    of = [f"{lesser[f'{name}_share'] or 0:.1%} {what}" for name, what in named if lesser[name]]
    return f"{', '.join(of) or 'none'} of the evaluations"


def shared_line(both: dict[str, Any]) -> str:
    """How misses were shared out between a device and the host, for people."""
    return (
        f"{both['on_host']:,} computed in host memory ({both['on_host_share'] or 0:.1%}),"
        f" {both['moved']:,} moved"
    )


def _of_model(stats: dict[str, Any]) -> list[str]:
    memory, experts, kv = stats["memory"], stats["experts"], stats["kv"]
    budget = memory["budget_bytes"]
    of = f" of the budget's {show_bytes(budget)}" if budget else ""
    did = stats["prefetch"]
    links = ", ".join(f"{link['link']} {show_bytes(link['bytes'])}" for link in stats["links"])
    lesser = stats.get("lesser")
    both = stats.get("co_compute")
    misses = [f"inexact   {inexact_line(lesser)}"] if lesser else []
    misses += [f"misses    {shared_line(both)}"] if both else []
    return [
        f"experts   {memory['slots']:,} of {memory['experts']:,} in slots"
        f" ({show_bytes(memory['resident_bytes'])}), hit ratio {experts['hit_ratio']:.1%},"
        f" policy {experts['policy']}",
        *misses,
        f"prefetch  {did['predictor']}: {did['useful']:,} useful, {did['late']:,} late,"
        f" {did['wasted']:,} wasted",
        f"links     {links or 'none'}; waited {stats['stall_s']:.2f} s",
        f"memory    {show_bytes(memory['process_bytes'])}{of}; keys and values"
        f" {show_bytes(kv['reserved_bytes'])} of {show_bytes(kv['limit_bytes'])}",
    ]
