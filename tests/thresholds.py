"""Configs of a scheduler whose misses are approximated, by thresholds."""

from __future__ import annotations

from greenroom.core.config.base import Approximation
from greenroom.core.config.scheduler import SchedulerConfig


def config_of(at: Approximation) -> SchedulerConfig:
    """Scheduler options for these thresholds; copies are int4 where no precision is set."""
    precision = "int4" if at.precision == "off" else at.precision
    return SchedulerConfig(
        miss_precision=precision if at.low else "off",
        low_below=at.low or None,
        low_share=f"{100 * at.share:g}%" if at.low else "12.5%",
        low_follow=at.promote,
        skip_below=at.skip,
        substitute_below=at.substitute,
    )
