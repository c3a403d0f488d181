"""Prometheus metrics: histograms of answers' times, and the serving engine's statistics.

Names of metrics end in their unit. The engine's statistics are read for each scrape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.registry import Collector

from greenroom.server.engine.loop import ContinuousEngine
from greenroom.server.engine.requests import REASONS, Finished
from greenroom.server.http.request_log import tpot_s

TTFT_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
TPOT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
QUEUED_S = (0.001, 0.01, 0.1, 1, 10, 100)


class Metrics:
    """Prometheus metrics of one server and its engine, in their own registry.

    `models` are the names of the model and of its adapters.
    """

    CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, engine: ContinuousEngine, models: Sequence[str]) -> None:
        self._registry = CollectorRegistry()
        self._ttft, self._tpot, self._queued = (
            Histogram(
                f"greenroom_{name}_seconds", text, ["model"],
                buckets=bounds, registry=self._registry,
            )
            for name, text, bounds in TIMES
        )  # fmt: skip
        for each in models:  # a model without answers has zeros
            self._ttft.labels(each), self._tpot.labels(each), self._queued.labels(each)
        self._registry.register(EngineCollector(engine, models[0]))

    def observe_answer(self, finished: Finished, model: str) -> None:
        """Add an ended answer's times to its model's histograms. Any thread may call this."""
        self._queued.labels(model).observe(finished.queued_s)
        if finished.ttft_s is not None:
            self._ttft.labels(model).observe(finished.ttft_s)
        if (tpot := tpot_s(finished)) is not None:
            self._tpot.labels(model).observe(tpot)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format.

        The call may wait for the end of a forward pass.
        """
        return generate_latest(self._registry)


class EngineCollector(Collector):
    """Collects a serving engine's state and statistics as Prometheus metrics.

    Statistics without a value are left out.
    """

    def __init__(self, engine: ContinuousEngine, model: str) -> None:
        self._engine, self._model = engine, model

    def collect(self) -> Iterator[Any]:
        state, progress, _ = self._engine.state()
        up = float(state == "ready")
        yield Gauge("greenroom_up", "1 if the model is ready", value=up)
        yield Gauge("greenroom_load_progress", "progress of loading, from 0 to 1", value=progress)
        info = Gauge("greenroom_model_info", "the model's name", labels=["model"])
        info.add_metric([self._model], 1)
        yield info
        yield from engine_metrics(self._engine.stats())

    def describe(self) -> Iterator[Any]:
        return iter(())  # the engine has no statistics before it runs


def engine_metrics(stats: dict[str, Any]) -> Iterator[Any]:
    """Yield the Prometheus metrics for which a serving engine's statistics have values.

    `stats` is the result of `ContinuousEngine.stats`. Every finish reason has a value: Prometheus
    counts no increase of a counter that begins with 1, as that of the first error would.
    """
    ended = stats.get("requests")
    if isinstance(ended, dict):
        stats = {**stats, "requests": {**dict.fromkeys(REASONS, 0), **ended}}
    for kind, name, path, label, text in METRICS:
        family = kind(f"greenroom_{name}", text, labels=[label] if label else [])
        for labels, value in _values(stats, path, label):
            family.add_metric(labels, value)
        if family.samples:
            yield family


def _values(stats: dict[str, Any], path: str, label: str) -> list[tuple[list[str], float]]:
    """Return the labels and values of a metric from the engine's statistics.

    The value at `path` is a number, a list of rows, or a table of counts.
    """
    value: Any = stats
    for part in path.split("."):
        if isinstance(value, list):
            return [([str(row[label])], row[part]) for row in value]
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, dict):
        numbers = {each: n for each, n in value.items() if type(n) in (int, float)}
        return [([each], n) for each, n in numbers.items() if each not in NOT_COUNTS]
    return [] if value is None else [([], value)]


# (name, text, bounds)
TIMES = (
    ("ttft", "time to the first token", TTFT_S),
    ("tpot", "mean time between the tokens of an answer", TPOT_S),
    ("queue", "time in the queue", QUEUED_S),
)
# (kind, name, where in the statistics, label, text)
METRICS: tuple[tuple[Any, str, str, str, str], ...] = (
    (Gauge, "running_requests", "queue.running", "", "answers that are being computed"),
    (Gauge, "queued_requests", "queue.waiting", "", "requests in the queue"),
    (Gauge, "budget_bytes", "memory.budget_bytes", "", "memory budget (--memory)"),
    (Gauge, "resident_bytes", "memory.resident_bytes", "", "bytes of the expert cache's slots"),
    (Gauge, "resident_experts", "memory.slots", "", "slots of the expert cache"),
    (Gauge, "pressure_reserve_bytes", "pressure.reserve_bytes", "", "memory left free to others"),
    (Counter, "pressure_shrinks", "pressure.shrinks", "", "shrinks of the cache, memory was short"),
    (Counter, "pressure_growths", "pressure.growths", "", "growths of the cache afterwards"),
    (Counter, "pressure_released_bytes", "pressure.released_bytes", "", "bytes given back"),
    (Gauge, "process_resident_bytes", "memory.process_bytes", "", "memory of the process"),
    (Gauge, "kv_limit_bytes", "kv.limit_bytes", "", "limit of keys and values"),
    (
        Gauge,
        "kv_reserved_bytes",
        "kv.reserved_bytes",
        "",
        "keys and values reserved by running requests",
    ),
    (Gauge, "prefix_bytes", "prefixes.bytes", "", "keys and values in the prefix cache"),
    (Counter, "passes", "passes.count", "", "forward passes"),
    (Counter, "pass_tokens", "passes.tokens", "", "tokens of all passes"),
    (Counter, "pass_faults", "passes.faults", "", "passes that failed and were tried again"),
    (Counter, "prefixes_evicted", "prefixes.evicted", "", "entries evicted from the prefix cache"),
    (Gauge, "prompt_cache_files", "prompt_cache.files", "", "files of the prompt cache on disk"),
    (Gauge, "prompt_cache_bytes", "prompt_cache.bytes", "", "bytes of these files"),
    (Counter, "prompt_cache_hits", "prompt_cache.hits", "", "prompts with a prefix on disk"),
    (Counter, "prompt_cache_misses", "prompt_cache.misses", "", "prompts without one"),
    (Counter, "prompt_cache_tokens", "prompt_cache.tokens", "", "tokens read from disk"),
    (Counter, "prompt_cache_read_bytes", "prompt_cache.bytes_read", "", "bytes read from disk"),
    (
        Counter,
        "prompt_cache_written_bytes",
        "prompt_cache.bytes_written",
        "",
        "bytes written to disk",
    ),
    (Counter, "prompt_cache_evicted", "prompt_cache.evicted", "", "files removed for others"),
    (Counter, "prompt_cache_damaged", "prompt_cache.damaged", "", "files removed as damaged"),
    (Counter, "prompt_cache_dropped", "prompt_cache.dropped", "", "prompts that were not written"),
    (Counter, "expert_bytes_read", "experts.bytes_read", "", "bytes of experts that were read"),
    (Counter, "stalled_seconds", "stall_s", "", "seconds with nothing to compute"),
    (
        Counter,
        "host_computed_seconds",
        "co_compute.host_s",
        "",
        "seconds in which the host computed experts",
    ),
    (
        Counter,
        "expert_hits",
        "experts.layers.hits",
        "layer",
        "requested experts that were in memory",
    ),
    (
        Counter,
        "expert_misses",
        "experts.layers.misses",
        "layer",
        "requested experts that were not in memory",
    ),
    (Counter, "link_bytes", "links.bytes", "link", "bytes transferred"),
    (Counter, "link_busy_seconds", "links.busy_s", "link", "seconds in which the link was busy"),
    (Counter, "link_idle_seconds", "links.idle_s", "link", "seconds in which the link was idle"),
    (Counter, "answers", "requests", "reason", "answers by finish reason"),
    (Counter, "tokens", "tokens", "kind", "tokens by kind"),
    (Counter, "prefetches", "prefetch", "outcome", "prefetches by outcome"),
    (
        Counter,
        "inexact_evaluations",
        "approximated",
        "kind",
        "experts computed approximately, or skipped",
    ),
    (
        Counter,
        "miss_evaluations",
        "co_compute",
        "where",
        "misses moved to the device, or computed on the host",
    ),
    (Counter, "stall_seconds", "stalls", "cause", "seconds with nothing to compute, by cause"),
)
APPROXIMATION_SETTINGS = (
    "low_below",
    "skip_below",
    "substitute_below",
    "cache_bias",
    "secondary_slots",
    "low_hits",
    "joined",
)
SHARE_FIELDS = (
    "low_share",
    "skipped_share",
    "substituted_share",
    "rerouted_share",
    "inexact_share",
)
CO_COMPUTE_FIELDS = ("promoted", "host_s", "on_host_share")
NOT_COUNTS = frozenset(
    {
        "distance",
        "accuracy",
        "fetch_rate",
        "goodpred",
        *APPROXIMATION_SETTINGS,
        *SHARE_FIELDS,
        *CO_COMPUTE_FIELDS,
    }
)
