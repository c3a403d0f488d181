"""Prometheus metrics: what was answered is counted here, the rest is asked of the engine.

Names end in their unit. What the engine counts is read when somebody asks (see `Engine.stats`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from greenroom.server.engine.requests import Engine, Finished
from greenroom.server.http.request_log import tpot_s

TTFT_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
TPOT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
QUEUED_S = (0.001, 0.01, 0.1, 1, 10, 100)


class Metrics:
    """Counts of one server, in a registry of its own."""

    CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, engine: Engine, model: str) -> None:
        self._registry = here = CollectorRegistry()
        self._answers = Counter(
            "greenroom_answers", "answers by how they ended", ["reason"], registry=here
        )
        self._tokens = Counter("greenroom_tokens", "tokens by kind", ["kind"], registry=here)
        self._ttft = Histogram(
            "greenroom_ttft_seconds", "time to the first token", buckets=TTFT_S, registry=here
        )
        self._tpot = Histogram(
            "greenroom_tpot_seconds", "mean time between the tokens of an answer",
            buckets=TPOT_S, registry=here,
        )  # fmt: skip
        self._queued = Histogram(
            "greenroom_queue_seconds", "wait for a place", buckets=QUEUED_S, registry=here
        )
        here.register(EngineCollector(engine, model))

    def finished(self, finished: Finished) -> None:
        """Count an answer. From any thread."""
        self._answers.labels(finished.reason).inc()
        self._tokens.labels("prompt").inc(finished.prompt_tokens)
        self._tokens.labels("reused").inc(finished.reused_tokens)
        self._tokens.labels("new").inc(finished.new_tokens)
        self._queued.observe(finished.queued_s)
        if finished.ttft_s is not None:
            self._ttft.observe(finished.ttft_s)
        if (tpot := tpot_s(finished)) is not None:
            self._tpot.observe(tpot)

    def text(self) -> bytes:
        """In Prometheus' format. Asks the engine, which may wait for the end of a pass."""
        return generate_latest(self._registry)


class EngineCollector(Collector):
    """What the engine's statistics say, as metrics; numbers that it does not give are left out."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine, self._model = engine, model

    def collect(self) -> Iterator[Any]:
        state, progress, _ = self._engine.state()
        yield _gauge("greenroom_up", "1 where the model answers", float(state == "ready"))
        yield _gauge("greenroom_load_progress", "of loading, from 0 to 1", progress)
        info = GaugeMetricFamily("greenroom_model_info", "the model's name", labels=["model"])
        info.add_metric([self._model], 1)
        yield info
        yield from engine_metrics(self._engine.stats())

    def describe(self) -> Iterator[Any]:
        return iter(())  # nothing is asked of the engine before it runs


def engine_metrics(stats: dict[str, Any]) -> Iterator[Any]:
    """Metrics of one snapshot (see `Engine.stats`); what it does not have is left out."""
    for name, path, text in GAUGES:
        if (value := _at(stats, path)) is not None:
            yield _gauge(f"greenroom_{name}", text, value)
    for name, path, text in COUNTERS:
        if (value := _at(stats, path)) is not None:
            yield CounterMetricFamily(f"greenroom_{name}", text, value=value)
    for name, path, label, key, text in ROWS:
        if rows := _at(stats, path):
            family = CounterMetricFamily(f"greenroom_{name}", text, labels=[label])
            for row in rows:
                family.add_metric([str(row[label])], row[key])
            yield family
    for name, path, label, text in TABLES:
        if table := _at(stats, path):
            family = CounterMetricFamily(f"greenroom_{name}", text, labels=[label])
            for each, value in table.items():
                if type(value) in (int, float) and each not in NO_COUNTS:
                    family.add_metric([each], value)
            yield family


# (name, where in the statistics, text)
GAUGES = (
    ("running_requests", "queue.running", "answers that are being computed"),
    ("queued_requests", "queue.waiting", "requests that wait for a place"),
    ("budget_bytes", "memory.budget_bytes", "--memory"),
    ("resident_bytes", "memory.resident_bytes", "bytes of the expert cache's slots"),
    ("resident_experts", "memory.slots", "slots of the expert cache"),
    ("process_resident_bytes", "memory.process_bytes", "memory of the process"),
    ("kv_limit_bytes", "kv.limit_bytes", "keys and values that there may be"),
    ("kv_reserved_bytes", "kv.reserved_bytes", "keys and values of what runs"),
    ("prefix_bytes", "prefixes.bytes", "keys and values that are kept for reuse"),
)
COUNTERS = (
    ("passes", "passes.count", "forward passes"),
    ("pass_tokens", "passes.tokens", "tokens of all passes"),
    ("pass_faults", "passes.faults", "passes that failed and were tried again"),
    ("prefixes_evicted", "prefixes.evicted", "prefixes that made room for others"),
    ("expert_bytes_read", "experts.bytes_read", "bytes of experts that were read"),
    ("stalled_seconds", "stall_s", "seconds with nothing to compute"),
    ("host_computed_seconds", "co_compute.host_s", "seconds that the host computed experts"),
)
# (name, where, label, key, text)
ROWS = (
    ("expert_hits", "experts.layers", "layer", "hits", "experts that were there when asked for"),
    ("expert_misses", "experts.layers", "layer", "misses", "experts that were not"),
    ("link_bytes", "links", "link", "bytes", "bytes carried"),
    ("link_busy_seconds", "links", "link", "busy_s", "seconds in which it carried any"),
    ("link_idle_seconds", "links", "link", "idle_s", "seconds in which it carried none"),
)
# (name, where, label, text)
TABLES = (
    ("prefetches", "prefetch", "outcome", "prefetches by what became of them"),
    ("inexact_evaluations", "lesser", "kind", "experts computed with less than their own weights"),
    ("miss_evaluations", "co_compute", "where", "misses that were moved, or computed on the host"),
    ("stall_seconds", "stalls", "cause", "seconds with nothing to compute, by cause"),
)
OF_LESSER = ("low_below", "skip_below", "substitute_below", "seats", "low_hits", "joined")
SHARES = ("low_share", "left_out_share", "substituted_share", "inexact_share")
OF_BOTH = ("adopted", "host_s", "on_host_share")
NO_COUNTS = frozenset({"distance", "accuracy", "goodpred", *OF_LESSER, *SHARES, *OF_BOTH})


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _at(stats: Any, path: str) -> Any:
    for part in path.split("."):
        stats = stats.get(part) if isinstance(stats, dict) else None
    return stats
