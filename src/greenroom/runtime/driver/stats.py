"""Statistics of a run, as `model.greenroom.stats()` gives them."""

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
    """Counts since the last reset; also a mapping of its fields.

    `capacity` is in slots, those that there are now; where keys and values share their memory,
    there were `capacity_least` to `capacity_most` since the last reset. `expert_requests` counts
    one a distinct expert of each step; bytes are those that experts have on disk; `stall_s` is time
    spent waiting with nothing to compute. `memory_bytes` is what the process takes once every slot
    is filled, with a short context, and `peak_rss_bytes` the most that it took so far, both counted
    alike. `budget_bytes` is None where the cache was sized alone.

    `prefetch` says what was predicted and what became of it (see `prefetch_stats`), `stalls` the
    seconds by cause, `links` what each link carried; `host` is the tier that keeps experts in host
    memory behind a device: its slots, what it was asked for, and how much of that it had; `split`
    is how experts are cut (see `split_stats`), None where they are whole; `lesser` says how
    misses were approximated (see `approximation_stats`), None where all are exact.
    `co_compute` says how many misses were moved and how many the host's processor computed (see
    `host_stats`); None where all of them are moved.
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
    """How experts are cut: slots of tops of each group, each layer's share of a top, slots for
    bottoms, and how many bottoms were asked for and there."""
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
    """Counts of approximated misses, and their shares of all evaluations.

    `low` were computed from a copy, which `low_hits` times was there; `left_out`
    were not computed; `substituted` were computed with another expert's weights. `joined` misses
    were exact, and fetched only what their copy lacked; `adopted` experts were promoted after
    their copies.
    Shares are None before the first request.
    """
    if at is None:
        return None
    copies = driver.pieces.copies
    names = ("low", "left_out", "substituted")
    given = {name: getattr(counts, name) for name in names}
    of = counts.requests
    return {
        "precision": at.precision,
        "low_below": at.low,
        "skip_below": at.skip,
        "substitute_below": at.substitute,
        "seats": copies.secondary_slots if copies is not None else 0,
        **given,
        "low_hits": counts.low_hits,
        "joined": counts.joined,
        "adopted": counts.adopted,
        **{f"{name}_share": n / of if of else None for name, n in given.items()},
        "inexact_share": sum(given.values()) / of if of else None,
    }


def host_stats(driver: Driver, counts: Counts, seconds: float) -> dict[str, Any] | None:
    """Misses that were `moved` to a device, and those computed `on_host`, in so many seconds.

    `adopted` ones of these were promoted to the device. The share is None before the first miss."""
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
    """What prefetching did. `began` prefetches ended as one of the next six, or are under way.

    accuracy: the share of the experts used that were among the top-k predicted, and by layer;
    goodpred: the share that was predicted and there in time (ProMoE, 4.1); `on`: whether the guard
    lets it run now, and `verdict` why. Shares are None where nothing was predicted.
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
    """Of each link: bytes carried, and the seconds in which it carried any and none."""
    return [
        {
            "link": name,
            "bytes": link.nbytes,
            "busy_s": link.busy_s,
            "idle_s": max(0.0, meter.at - link.busy_s),
        }
        for name, link in zip(driver.links, meter.links, strict=True)
    ]
