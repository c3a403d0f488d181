"""Prometheus metrics: what was answered is counted here, the rest is asked of the engine.

Names end in their unit. What the engine counts is read when somebody asks (see `Engine.stats`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from greenroom.server.requests import Engine, Finished
from greenroom.server.served import tpot_s

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
    """Metrics of one snapshot."""
    for name, key, text in GAUGES:
        if (value := _at(stats, key)) is not None:
            yield _gauge(f"greenroom_{name}", text, value)
    for name, key, text, label in LABELLED:
        found = _at(stats, key)
        if found is None:
            continue
        family = CounterMetricFamily(f"greenroom_{name}", text, labels=[label])
        for each, value in found.items() if isinstance(found, dict) else enumerate(found):
            if isinstance(value, int | float):
                family.add_metric([str(each)], value)
        yield family
    for name, key, text in LINKS:
        links = stats.get("links") or []
        family = CounterMetricFamily(f"greenroom_link_{name}", text, labels=["link"])
        for link in links:
            family.add_metric([str(link["link"])], link[key])
        yield family


# (name, where in the statistics, text)
GAUGES = (
    ("running_requests", "running", "answers that are being computed"),
    ("queued_requests", "queued", "requests that wait for a place"),
    ("resident_experts", "cache.capacity", "slots of the expert cache"),
    ("resident_bytes", "cache.resident_bytes", "bytes of the expert cache's slots"),
    ("budget_bytes", "cache.budget_bytes", "--memory"),
    ("process_resident_bytes", "cache.rss_bytes", "memory of the process"),
    ("kv_bytes", "kv.bytes", "keys and values that there is room for"),
    ("prefix_tokens", "prefixes.tokens", "tokens whose keys and values are kept for reuse"),
)
LABELLED = (
    ("expert_hits", "layers.hits", "experts that were resident when asked for", "layer"),
    ("expert_misses", "layers.misses", "experts that were not", "layer"),
    ("prefetches", "prefetch", "prefetches by what became of them", "outcome"),
    ("stall_seconds", "stalls", "seconds with nothing to compute, by cause", "cause"),
)
LINKS = (
    ("bytes", "bytes", "bytes carried"),
    ("busy_seconds", "busy_s", "seconds in which it carried any"),
)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _at(stats: Any, path: str) -> Any:
    for part in path.split("."):
        stats = stats.get(part) if isinstance(stats, dict) else None
    return stats
