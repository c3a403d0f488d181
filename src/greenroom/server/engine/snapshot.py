"""Statistics of the serving engine, for `/v1/stats` and `/metrics`."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from greenroom.runtime.memory.system import rss_bytes
from greenroom.server.engine.requests import Finished

if TYPE_CHECKING:
    from greenroom.server.engine.loop import ContinuousEngine

OPTIONAL = "approximated", "co_compute", "pressure"
RECENT = 64  # ended requests whose results are stored
USUAL = 0.2  # weight of the newest answer in the moving average


@dataclass(slots=True)
class Totals:
    """Totals of ended requests: counts by reason, tokens, and the average time of an answer.

    `usual_s` is a moving average of the seconds from admission to end, over requests that got at
    least one token. `recent` has the results of the last requests, each with the time of its end on
    the monotonic clock, and without its error, whose traceback would keep the request's KV cache.
    """

    reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    usual_s: float = 0.0
    recent: deque[tuple[float, Finished]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, finished: Finished) -> None:
        self.reasons[finished.reason] += 1
        self.prompt_tokens += finished.prompt_tokens
        self.reused_tokens += finished.reused_tokens
        self.new_tokens += finished.new_tokens
        self.recent.append((time.monotonic(), replace(finished, error=None)))
        if not finished.new_tokens:
            return
        took = finished.duration_s - finished.queued_s
        self.usual_s += USUAL * (took - self.usual_s) if self.usual_s else took

    def as_json(self) -> dict[str, Any]:
        kinds = ("prompt", "reused", "new")
        tokens = {kind: getattr(self, f"{kind}_tokens") for kind in kinds}
        return {"requests": dict(self.reasons), "tokens": tokens}


def snapshot(engine: ContinuousEngine) -> dict[str, Any]:
    """Return JSON-ready statistics of the serving engine, in bytes and seconds.

    The keys are `state`, `queue`, `requests` (ended ones, by reason) and `tokens`. Once the model
    is loaded, the statistics of `model_stats` are added: forward passes, memory, KV caches, the
    prefix cache, the expert cache and prefetching. They stay at their last values when the engine
    has stopped.
    """
    name, progress, why = engine.state()
    config = engine.config
    stats: dict[str, Any] = {
        "state": {"name": name, "progress": progress, "why": why},
        "queue": {
            "waiting": engine.waiting,
            "running": engine.running,
            "max_queue": config.max_queue,
            "max_batch": config.max_batch,
        },
        **engine.totals.as_json(),
    }
    if engine.final is not None:
        return stats | engine.final
    return stats | (model_stats(engine) if engine.was_ready else {})


def model_stats(engine: ContinuousEngine) -> dict[str, Any]:
    """Return the statistics of the serving engine that need its loaded model.

    They are of passes, memory, KV caches, the prefix cache, the expert cache and prefetching.
    """
    greenroom, passes, admission = engine.greenroom, engine.passes, engine.admission
    stats, prefixes = greenroom.stats(), admission.prefixes
    return {
        "passes": {
            "count": passes.passes,
            "tokens": passes.tokens,
            "faults": passes.faults,
            "apart": engine.batch.sequential_reason,
        },
        "memory": {
            "budget_bytes": stats.budget_bytes,
            "expected_bytes": stats.memory_bytes,
            "resident_bytes": stats.capacity * stats.slot_bytes,
            "process_bytes": rss_bytes(),
            "peak_bytes": stats.peak_rss_bytes,
            "slots": stats.capacity,
            "slot_bytes": stats.slot_bytes,
            "experts": stats.experts,
        },
        "kv": {"limit_bytes": admission.limit, "reserved_bytes": admission.reserved},
        "prefixes": {
            "entries": len(prefixes),
            "bytes": prefixes.nbytes,
            "limit_bytes": prefixes.limit,
            "evicted": prefixes.evicted,
        },
        **({} if admission.prompts is None else {"prompt_cache": admission.prompts.stats()}),
        "experts": {
            "policy": stats.policy,
            "kernels": stats.kernels,
            "requests": stats.expert_requests,
            "hits": stats.expert_hits,
            "hit_ratio": stats.hit_ratio,
            "bytes_read": stats.bytes_read,
            "layers": _by_layer(greenroom),
        },
        **({} if engine.drafts is None else {"speculation": engine.drafts.speculation.as_json()}),
        **{name: stats[name] for name in ("prefetch", "stalls", "stall_s", "links")},
        **{name: stats[name] for name in OPTIONAL if stats[name] is not None},
    }


def _by_layer(greenroom: Any) -> list[dict[str, int]]:
    """Return expert requests, hits and misses of each layer since the model was loaded."""
    driver = greenroom.driver
    offsets = np.asarray(driver.pieces.offsets)
    requests = np.add.reduceat(driver.request_counts, offsets[:-1]).tolist()
    return [
        {"layer": layer, "requests": count, "hits": count - missed, "misses": missed}
        for layer, (count, missed) in enumerate(
            zip(requests, driver.miss_counts.tolist(), strict=True)
        )
    ]
