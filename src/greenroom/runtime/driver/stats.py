"""Statistics of a run, as `model.greenroom.stats()` returns them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from greenroom.core.config.base import Approximation
from greenroom.core.counts import Counts
from greenroom.core.predictor import Predictor
from greenroom.runtime.driver.meter import Meter

if TYPE_CHECKING:
    from greenroom.runtime.driver.driver import Driver


@dataclass(frozen=True, slots=True)
class Stats(Mapping[str, Any]):
    """Statistics of a model's run since the last reset; also a mapping of its fields.

    `capacity` is the present number of slots; where the KV cache shares their memory, it has been
    between `capacity_least` and `capacity_most` since the last reset. `expert_requests` counts each
    distinct expert of a step once; bytes are those on disk; `stall_s` is time in which steps only
    waited. `memory_bytes` is the memory of the process once every slot is filled, with a short
    context; `peak_rss_bytes` is the most so far, counted in the same way. `budget_bytes` is None
    where only the size of the cache was given (`--cache`).

    prefetch: predictions and prefetches (see `prefetch_stats`)
    stalls: seconds by cause
    links: traffic of each link (see `link_stats`)
    host: the cache in host memory behind a device: its slots, requests and hits
    split: how experts are split (see `split_stats`); None where they are not
    lesser: how misses were approximated (see `approximation_stats`); None where all are exact
    co_compute: misses moved, and misses computed on the host (see `host_stats`); None where all
        are moved
    """

    policy: str
    kernels: str
    capacity: int
    experts: int
    slot_bytes: int
    passes: int
    expert_requests: int
    expert_hits: int
    hit_ratio: float
    bytes_read: int
    stall_s: float
    peak_rss_bytes: int
    memory_bytes: int | None
    budget_bytes: int | None
    prefetch: dict[str, Any]
    stalls: dict[str, float]
    links: list[dict[str, Any]]
    host: dict[str, int] | None = None
    capacity_least: int = 0
    capacity_most: int = 0
    split: dict[str, Any] | None = None
    lesser: dict[str, Any] | None = None
    co_compute: dict[str, Any] | None = None

    def __getitem__(self, name: str) -> Any:
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))


def split_stats(driver: Driver, counts: Counts) -> dict[str, Any] | None:
    """Return the slots, shares, requests and hits of experts that are split into two segments.

    tops: slots for top segments in each group; seats: slots for bottom segments
    shares: the top segment's share of an expert, by layer
    bottoms, bottom_hits: requests of bottom segments, and those that were resident
    """
    scheduler = driver.scheduler
    if (split := driver.pieces.split) is None:
        return None
    return {
        "tops": scheduler.view.group_sizes(),
        "shares": [a / (a + b) for a, b in zip(split.tops, split.bottoms, strict=True)],
        "seats": split.secondary_slots,
        "bottoms": counts.bottoms,
        "bottom_hits": counts.bottom_hits,
    }


def approximation_stats(
    driver: Driver, counts: Counts, at: Approximation | None
) -> dict[str, Any] | None:
    """Count cache misses that were approximated, and their shares of all expert requests.

    low, low_hits: computed from a copy; those whose copy was resident
    left_out: not computed
    substituted: computed with another expert's weights
    joined: exact misses that fetched only what their copy lacked
    adopted: experts that were promoted after their copies

    Shares are None before the first request.
    """
    if at is None:
        return None
    copies = driver.pieces.copies
    names = ("low", "left_out", "substituted")
    approximated = {name: getattr(counts, name) for name in names}
    of = counts.requests
    return {
        "precision": at.precision,
        "low_below": at.low,
        "skip_below": at.skip,
        "substitute_below": at.substitute,
        "seats": copies.secondary_slots if copies is not None else 0,
        **approximated,
        "low_hits": counts.low_hits,
        "joined": counts.joined,
        "adopted": counts.adopted,
        **{f"{name}_share": n / of if of else None for name, n in approximated.items()},
        "inexact_share": sum(approximated.values()) / of if of else None,
    }


def host_stats(driver: Driver, counts: Counts, seconds: float) -> dict[str, Any] | None:
    """Count misses moved to the GPU, and misses computed on the host processor.

    The fields are `moved` and `on_host`.

    adopted: experts computed on the host that were promoted to the device afterwards
    host_s: seconds of computing on the host
    on_host_share: None before the first miss
    """
    if not any(each.uses_host for each in driver.scheduler.options):
        return None
    return {
        "moved": counts.misses - counts.on_host,
        "on_host": counts.on_host,
        "adopted": counts.adopted,
        "host_s": seconds,
        "on_host_share": counts.on_host / counts.misses if counts.misses else None,
    }


def prefetch_stats(driver: Driver, predictor: Predictor | None, counts: Counts) -> dict[str, Any]:
    """Return counts of prefetched experts, and the accuracy of their predictions.

    began: prefetches; each ended as one of the next six, or is in flight
    accuracy: share of the used experts that were among the top-k predicted, also by layer
    goodpred: share that was predicted and resident in time (ProMoE, section 4.1)
    on, verdict: whether the guard lets prefetching run now, and why

    Shares are None where nothing was predicted.
    """
    accuracy = driver.scheduler.view.accuracy
    guard = driver.predictions.guard
    return {
        "predictor": predictor.name if predictor else "off",
        "distance": predictor.distance if predictor else None,
        "on": driver.predictions.foresight is not None and driver.predictions.foresight.on,
        "verdict": guard.verdict if guard else None,
        "began": counts.prefetches,
        "useful": counts.useful,
        "late": counts.late,
        "wasted": counts.wasted,
        "dropped": counts.dropped,
        "displaced": counts.displaced,
        "failed": counts.failed,
        "accuracy": accuracy.share(),
        "goodpred": accuracy.good(),
        "accuracy_by_layer": accuracy.by_layer(),
    }


def link_stats(driver: Driver, meter: Meter) -> list[dict[str, Any]]:
    """Return each link's transferred bytes, and its busy and idle seconds."""
    return [
        {
            "link": name,
            "bytes": link.nbytes,
            "busy_s": link.busy_s,
            "idle_s": max(0.0, meter.at - link.busy_s),
        }
        for name, link in zip(driver.links, meter.links, strict=True)
    ]
