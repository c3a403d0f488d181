"""Collect the statistics of a model's expert cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from greenroom.core.counts import Counts
from greenroom.core.transfers.tiers import HostTier
from greenroom.runtime.driver.driver import Driver
from greenroom.runtime.driver.meter import Meter, subtract_counts
from greenroom.runtime.driver.stats import (
    Stats,
    approximation_stats,
    host_stats,
    link_stats,
    prefetch_stats,
    split_stats,
)
from greenroom.runtime.memory.system import peak_rss_bytes

if TYPE_CHECKING:
    from greenroom.hf.attach.attach import Greenroom

Totals = tuple[Counts, Meter, int, int]


def totals(driver: Driver, host_tier: HostTier | None) -> Totals:
    """Return all counters since loading: cache, reads, requests and hits in host memory."""
    driver.device_steps.count_loads()
    host_counts = (0, 0) if host_tier is None else (host_tier.requests, host_tier.hits)
    return driver.scheduler.view.counted(), driver.meter.copy(), *host_counts


def collect_stats(greenroom: Greenroom, host_tier: HostTier | None, base: Totals) -> Stats:
    """Return the statistics of an expert cache since the counters were at `base`."""
    driver, catalog = greenroom.driver, greenroom.setup.catalog
    driver.predictions.drain()
    driver.device_steps.count_loads()
    counts_before, meter_before, requests, hits = base
    counts = subtract_counts(driver.scheduler.view.counted(), counts_before)
    meter = subtract_counts(driver.meter.copy(), meter_before)
    return Stats(
        policy=driver.scheduler.policy.name,
        kernels=greenroom.bindings.kernel_description,
        capacity=greenroom.capacity,
        capacity_least=driver.capacity_range[0],
        capacity_most=driver.capacity_range[1],
        experts=catalog.experts,
        slot_bytes=catalog.slot_bytes,
        passes=meter.passes,
        expert_requests=counts.requests,
        expert_hits=counts.hits,
        hit_ratio=counts.hits / counts.requests if counts.requests else 0.0,
        bytes_read=meter.bytes_read,
        stall_s=meter.stall_s,
        peak_rss_bytes=peak_rss_bytes(),
        memory_bytes=greenroom.memory_bytes,
        budget_bytes=greenroom.setup.budget_bytes,
        prefetch=prefetch_stats(driver, greenroom.predictor, counts, meter),
        stalls=dict(meter.stalls),
        links=link_stats(driver, meter),
        split=split_stats(driver, counts),
        approximated=approximation_stats(driver, counts, greenroom.setup.approximation),
        subset=None if (subset := greenroom.setup.subset) is None else {
            "experts": subset.count, "model_experts": sum(subset.model_experts),
        },
        co_compute=host_stats(driver, counts, meter.host_s),
        pressure=None if greenroom.pressure is None else greenroom.pressure.stats(),
        host=None if host_tier is None else {
            "capacity": host_tier.capacity,
            "requests": host_tier.requests - requests,
            "hits": host_tier.hits - hits,
        },
    )  # fmt: skip
