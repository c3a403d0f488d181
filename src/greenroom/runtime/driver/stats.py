"""Statistics of a run, as `model.greenroom.stats()` returns them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from greenroom.config.values import INLINE, WORKER
from greenroom.core.config.base import Approximation
from greenroom.core.counts import Counts
from greenroom.core.predictor import Predictor
from greenroom.runtime.driver.meter import Meter

if TYPE_CHECKING:
    from greenroom.runtime.driver.driver import Driver


@dataclass(frozen=True, slots=True)
class Stats(Mapping[str, Any]):
    """Statistics of a model's run since the last reset; also a mapping of its fields.

    capacity: present number of cache slots for experts; since the last reset it was between
        `capacity_least` and `capacity_most`, since the KV cache may share the memory of the slots
    experts: number of experts of the model, over all layers
    slot_bytes: bytes of a slot
    passes: forward passes
    expert_requests: experts used by MoE layers, each distinct expert of a layer's pass counted once
    expert_hits: expert requests whose expert was completely in a slot when its layer began, either
        resident in the cache or prefetched to a borrowed slot
    hit_ratio: share of the expert requests that were hits
    bytes_read: bytes of experts read from disk
    stall_s: seconds in which MoE layers only waited for experts; `stalls` has them by cause
    peak_rss_bytes: the most resident memory (RSS) that the process has had since it began
    memory_bytes: memory of the process once every slot is filled, with a short context; None if
        unknown, as on a GPU
    budget_bytes: the memory budget; None if only the size of the cache was given (`--cache`)
    prefetch: predictions and prefetches (see `prefetch_stats`)
    links: traffic of each link (see `link_stats`)
    host: slots, requests and hits of the second expert cache, in host memory; None without one
    split: requests of split experts (see `split_stats`); None if experts are not split
    approximated: approximated misses (see `approximation_stats`); None if all misses are exact
    subset: how many experts the model has, and the complete model has; None if it has all
    co_compute: misses moved to the device, and misses computed on the host (see `host_stats`);
        None if all misses are moved
    pressure: how often the cache has shrunk because memory was short, since loading (see
        `PressureWatcher.stats` in `hf/memory/pressure.py`); None if it never does
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
    approximated: dict[str, Any] | None = None
    subset: dict[str, int] | None = None
    co_compute: dict[str, Any] | None = None
    pressure: dict[str, Any] | None = None

    def __getitem__(self, name: str) -> Any:
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))


def split_stats(driver: Driver, counts: Counts) -> dict[str, Any] | None:
    """Return the slots, requests and hits of experts that are split into two segments.

    The top segments are in the expert cache, the bottom segments are fetched when needed. Returns
    None if experts are not split.

    tops: slots for top segments, for each group of layers that shares slots
    secondary_slots: slots for bottom segments
    shares: the top segment's share of an expert's bytes, by layer
    bottoms, bottom_hits: expert requests of split experts, and those whose bottom segment was
        completely in its slot
    """
    scheduler = driver.scheduler
    if (split := driver.pieces.split) is None:
        return None
    return {
        "tops": scheduler.view.group_sizes(),
        "shares": [a / (a + b) for a, b in zip(split.tops, split.bottoms, strict=True)],
        "secondary_slots": split.secondary_slots,
        "bottoms": counts.bottoms,
        "bottom_hits": counts.bottom_hits,
    }


def approximation_stats(
    driver: Driver, counts: Counts, at: Approximation | None
) -> dict[str, Any] | None:
    """Count cache misses that were approximated, and their shares of all expert requests.

    low, low_hits: misses computed from a low-precision copy, and those whose copy was completely
        in its slot when the layer began
    skipped: misses that were not computed
    substituted: misses computed with another expert's weights
    rerouted: requests of experts in the cache for tokens whose router preferred other experts
    joined: exact misses that fetched only the bytes that the expert's copy in memory lacks
    promoted: exact experts fetched after a miss was computed from their copy
    secondary_slots: slots for low-precision copies

    A share is None before the first expert request. Returns None if all misses are computed
    exactly.
    """
    if at is None:
        return None
    copies = driver.pieces.copies
    names = ("low", "skipped", "substituted", "rerouted")
    approximated = {name: getattr(counts, name) for name in names}
    of = counts.requests
    return {
        "precision": at.precision,
        "low_below": at.low,
        "skip_below": at.skip,
        "substitute_below": at.substitute,
        "cache_bias": at.bias,
        "secondary_slots": copies.secondary_slots if copies is not None else 0,
        **approximated,
        "low_hits": counts.low_hits,
        "joined": counts.joined,
        "promoted": counts.promoted,
        **{f"{name}_share": n / of if of else None for name, n in approximated.items()},
        "inexact_share": sum(approximated.values()) / of if of else None,
    }


def host_stats(driver: Driver, counts: Counts, seconds: float) -> dict[str, Any] | None:
    """Count cache misses moved to the GPU, and misses computed on the host processor.

    moved, on_host: misses of each kind
    promoted: experts that were computed on the host and afterwards moved to the GPU
    host_s: seconds of computation on the host
    on_host_share: share of the misses that the host computed; None before the first miss

    Returns None if the host processor computes no experts.
    """
    if not any(each.uses_host for each in driver.scheduler.options):
        return None
    return {
        "moved": counts.misses - counts.on_host,
        "on_host": counts.on_host,
        "promoted": counts.promoted,
        "host_s": seconds,
        "on_host_share": counts.on_host / counts.misses if counts.misses else None,
    }


def prefetch_stats(
    driver: Driver, predictor: Predictor | None, counts: Counts, meter: Meter
) -> dict[str, Any]:
    """Return counts of prefetched experts, and the accuracy of their predictions.

    began: prefetches begun; each ended as `useful`, `late`, `wasted`, `dropped`, `displaced`,
        `failed` or `idle` (see `core.counts.Counts`), or has not ended yet
    idle, idle_used: experts read while no request was computed, and those requested since
    predict_in: the thread that runs the predictor: worker (its own), or inline (that computes);
        None without a predictor
    overtaken: predictions dropped because the router of their layer had chosen by then
    accuracy, accuracy_by_layer: share of the used experts that were among the top-k predicted
    fetch_rate: of the predicted experts that were absent, share that was prefetched in time
    goodpred: mean of ProMoE's GOODPRED (section 4.1) over layers and distances; GOODPRED is
        accuracy x fetch_rate, a distance the number of layers that a prediction is made ahead
    goodpred_by_layer: accuracy, fetch_rate and GOODPRED of each layer and distance
    on: whether experts are prefetched now; the guard stops prefetching while it does not pay, and
        `verdict` is its reason

    A share is None if nothing was predicted.
    """
    accuracy = driver.scheduler.view.accuracy
    guard = driver.predictions.guard
    return {
        "predictor": predictor.name if predictor else "off",
        "distance": predictor.distance if predictor else None,
        "on": driver.predictions.foresight is not None and driver.predictions.foresight.on,
        "verdict": guard.verdict if guard else None,
        "predict_in": predictor and (WORKER if driver.predictions.in_worker else INLINE),
        "overtaken": meter.overtaken,
        "began": counts.prefetches,
        "useful": counts.useful,
        "late": counts.late,
        "wasted": counts.wasted,
        "dropped": counts.dropped,
        "displaced": counts.displaced,
        "failed": counts.failed,
        "idle": counts.idle,
        "idle_used": counts.idle_used,
        "accuracy": accuracy.share(),
        "fetch_rate": accuracy.fetch_rate(),
        "goodpred": accuracy.good(),
        "accuracy_by_layer": accuracy.by_layer(),
        "goodpred_by_layer": accuracy.by_distance(),
    }


def link_stats(driver: Driver, meter: Meter) -> list[dict[str, Any]]:
    """Return each link's transferred bytes, and the seconds in which it was busy and idle.

    A link leads from one memory to another, as in "disk -> host".
    """
    return [
        {
            "link": name,
            "bytes": link.nbytes,
            "busy_s": link.busy_s,
            "idle_s": max(0.0, meter.at - link.busy_s),
        }
        for name, link in zip(driver.links, meter.links, strict=True)
    ]
