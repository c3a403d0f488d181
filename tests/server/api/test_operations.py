"""Health, statistics, metrics, the log, and the end of a server."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from greenroom.server.engine.requests import Finished
from greenroom.server.http.metrics import engine_metrics
from greenroom.server.http.request_log import (
    LogForwarder,
    RequestLog,
    RequestRecord,
    tokens_per_s,
    tpot_s,
)
from tests.server.conftest import NAME, Running, Serve, fake_engine, wait_for

CHAT: Any = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}]}
PATHS: dict[str, Any] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": NAME, "prompt": "Hello", "max_tokens": 1000},
    "/v1/responses": {"model": NAME, "input": "Hello"},
    "/v1/messages": {**CHAT, "max_tokens": 1000},
    "/api/chat": CHAT,
}
STATS: dict[str, Any] = {
    "state": {"name": "ready", "progress": 1.0, "why": "/secret"},
    "queue": {"waiting": 2, "running": 3, "max_queue": 64, "max_batch": 8},
    "passes": {"count": 10, "tokens": 30, "faults": 0, "apart": None},
    "memory": {"budget_bytes": None, "resident_bytes": 4096, "process_bytes": 9, "slots": 4},
    "kv": {"limit_bytes": 100, "reserved_bytes": 10},
    "prefixes": {"entries": 1, "bytes": 7, "limit_bytes": 50, "evicted": 2},
    "experts": {
        "bytes_read": 1000,
        "layers": [
            {"layer": 0, "requests": 4, "hits": 3, "misses": 1},
            {"layer": 2, "requests": 4, "hits": 4, "misses": 0},
        ],
    },
    "prefetch": {
        "predictor": "markov", "distance": 1, "on": True, "verdict": None, "began": 9, "useful": 5,
        "late": 1, "wasted": 3, "accuracy": 0.5, "goodpred": 0.4, "accuracy_by_layer": [0.5],
        "fetch_rate": 0.8, "goodpred_by_layer": [{"layer": 1, "distance": 1, "goodpred": 0.4}],
    },
    "stalls": {"demand": 1.5},
    "stall_s": 1.5,
    "links": [{"link": "disk", "bytes": 1000, "busy_s": 0.5, "idle_s": 2.0}],
}  # fmt: skip


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_count_answers(serve: Serve) -> None:
    running = serve(fake_engine("one two three", reused=2, delay_s=0.002))
    engine_stats = running.engine.stats
    running.engine.stats = lambda: {**STATS, **engine_stats()}  # type: ignore[method-assign]
    running.post("/v1/chat/completions", CHAT)
    running.post("/v1/chat/completions", {**CHAT, "max_tokens": 2, "stream": True})
    sent_tokens = [ticket.sent_tokens for ticket in running.engine.tickets]
    response = running.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    metrics = samples(response.text)
    prompt = sum(len(ticket.request.ids) for ticket in running.engine.tickets)
    assert metrics["greenroom_answers_total", (("reason", "stop"),)] == 1
    assert metrics["greenroom_answers_total", (("reason", "length"),)] == 1
    assert metrics["greenroom_answers_total", (("reason", "error"),)] == 0
    assert metrics["greenroom_tokens_total", (("kind", "prompt"),)] == prompt
    assert metrics["greenroom_tokens_total", (("kind", "reused"),)] == 4
    assert metrics["greenroom_tokens_total", (("kind", "new"),)] == sum(sent_tokens)
    assert metrics["greenroom_ttft_seconds_count", (("model", NAME),)] == 2
    assert metrics["greenroom_tpot_seconds_count", (("model", NAME),)] == 2
    assert metrics["greenroom_up", ()] == 1
    assert metrics["greenroom_model_info", (("model", NAME),)] == 1


def test_metrics_count_approximate_experts() -> None:
    approximations = {
        "precision": "int4", "low_below": 0.4, "secondary_slots": 9, "low": 3, "skipped": 1,
        "substituted": 0, "low_hits": 2, "joined": 4, "low_share": 0.3,
    }  # fmt: skip
    metrics = {
        tuple(sample.labels.values()): sample.value
        for family in engine_metrics({**STATS, "approximated": approximations})
        for sample in family.samples
        if sample.name == "greenroom_inexact_evaluations_total"
    }
    assert metrics == {("low",): 3, ("skipped",): 1, ("substituted",): 0}


def test_metrics_count_misses_by_where_they_are_computed() -> None:
    both = {"moved": 7, "on_host": 3, "promoted": 2, "host_s": 0.25, "on_host_share": 0.3}
    metrics = {
        (sample.name, *sample.labels.values()): sample.value
        for family in engine_metrics({**STATS, "co_compute": both})
        for sample in family.samples
        if sample.name.startswith(("greenroom_miss_", "greenroom_host_"))
    }
    assert metrics == {
        ("greenroom_miss_evaluations_total", "moved"): 7,
        ("greenroom_miss_evaluations_total", "on_host"): 3,
        ("greenroom_host_computed_seconds_total",): 0.25,
    }


def test_metrics_of_the_engine() -> None:
    metrics = {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in engine_metrics(STATS)
        for sample in family.samples
    }
    assert metrics["greenroom_expert_misses_total", ("0",)] == 1
    assert metrics["greenroom_expert_hits_total", ("2",)] == 4
    assert metrics["greenroom_queued_requests", ()] == 2
    assert metrics["greenroom_running_requests", ()] == 3
    assert metrics["greenroom_link_bytes_total", ("disk",)] == 1000
    assert metrics["greenroom_link_busy_seconds_total", ("disk",)] == 0.5
    assert metrics["greenroom_stall_seconds_total", ("demand",)] == 1.5
    assert metrics["greenroom_resident_bytes", ()] == 4096
    assert {labels for name, labels in metrics if name == "greenroom_prefetches_total"} == {
        ("began",), ("useful",), ("late",), ("wasted",),
    }  # fmt: skip
    assert ("greenroom_budget_bytes", ()) not in metrics


def test_metrics_while_loading_and_after_a_failure(serve: Serve) -> None:
    running = serve(fake_engine("Hi"))
    running.engine.now = ("loading", 0.5, "")
    running.engine.stats = lambda: {"queue": STATS["queue"]}  # type: ignore[method-assign]
    metrics = samples(running.get("/metrics").text)
    assert (metrics["greenroom_up", ()], metrics["greenroom_load_progress", ()]) == (0, 0.5)


def test_statistics_name_no_files(serve: Serve) -> None:
    running = serve(fake_engine("Hi"))
    running.engine.stats = lambda: STATS  # type: ignore[method-assign]
    response = running.get("/v1/stats").json()
    assert response["queue"] == STATS["queue"]
    assert "secret" not in json.dumps(response)


def test_the_log_has_a_line_for_each_request(serve: Serve) -> None:
    running = serve(fake_engine("one two three", reused=2, delay_s=0.002))
    response = running.post("/v1/chat/completions", CHAT)
    line = running.line()
    ticket = running.engine.tickets[0]
    assert response.headers["x-request-id"] in line
    assert "POST /v1/chat/completions 200" in line
    assert f"{len(ticket.request.ids)} prompt (2 reused) + {ticket.sent_tokens} new tokens" in line
    for part in ("TTFT", "tokens/s", "hit ratio 75.0%", "stop"):
        assert part in line
    assert len(running.lines) == 1


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_log_has_no_text_of_requests_and_answers(serve: Serve, form: str) -> None:
    running = serve(fake_engine("a confidential answer"), log_format=form)
    question = [{"role": "user", "content": "a confidential question"}]
    running.post("/v1/chat/completions", {**CHAT, "messages": question})
    running.post("/v1/chat/completions", {**CHAT, "messages": question, "n": 0})
    assert running.line(2)
    assert len(running.lines) == 2
    assert "confidential" not in "".join(running.lines)


def test_log_lines_can_be_json(serve: Serve) -> None:
    running = serve(fake_engine("one two three", delay_s=0.002), log_format="json")
    running.post("/v1/chat/completions", {**CHAT, "n": 2, "max_tokens": 3})
    response = json.loads(running.line())
    assert list(response) == [
        "time", "id", "method", "path", "status", "duration_s", "prompt_tokens", "reused_tokens",
        "new_tokens", "queued_s", "ttft_s", "tokens_per_s", "hit_ratio", "finish_reason",
    ]  # fmt: skip
    assert (response["new_tokens"], response["finish_reason"]) == (6, "length")
    running.post("/v1/chat/completions", {**CHAT, "n": 0})
    response = json.loads(running.line(2))
    assert (response["status"], "n:" in response["error"]) == (400, True)


def test_health_checks_and_scrapes_are_not_logged(serve: Serve) -> None:
    running = serve(fake_engine("Hi"), key="k")
    running.get("/health")
    running.get("/metrics", headers={"x-api-key": "k"})
    running.engine.now = ("failed", 1.0, "")
    running.get("/health")
    running.get("/metrics")
    assert "GET /metrics 401" in running.line()
    assert len(running.lines) == 1


def test_clients_cannot_forge_log_lines(serve: Serve) -> None:
    running = serve(fake_engine("Hi"))
    running.get("/v1/%0a%0dforged%20line")
    line = running.line()
    assert "\n" not in line
    assert "\r" not in line


def test_rates_are_of_decoding() -> None:
    one = Finished("stop", 3, 0, 5, 0.0, 1.0, 3.0, None)
    assert (tpot_s(one), tokens_per_s(one)) == (0.5, 2.0)
    assert tpot_s(Finished("stop", 3, 0, 1, 0.0, 1.0, 1.0, None)) is None
    assert tokens_per_s(Finished("cancelled", 3, 0, 0, 0.0, None, 1.0, None)) is None


def test_errors_are_logged_with_tracebacks() -> None:
    lines: list[str] = []
    for form in ("text", "json"):
        RequestLog(form, lines.append).log_failure("req_1", ValueError("why"))
    assert all("ValueError: why" in line and "req_1" in line for line in lines)
    RequestLog("text", lines.append).log_request(RequestRecord("req_2", "GET", "/"))
    assert lines[-1].endswith(" s")


def test_records_of_logging_have_the_format_of_the_log() -> None:
    for form in ("text", "json"):
        lines: list[str] = []
        log = logging.getLogger("greenroom.server.tests")
        handler = LogForwarder(RequestLog(form, lines.append))
        log.addHandler(handler)
        try:
            log.info("not said")
            log.warning("a %s", "warning")
            try:
                raise ValueError("why")
            except ValueError:
                log.exception("failed")
        finally:
            log.removeHandler(handler)
        logged = [json.loads(line) for line in lines] if form == "json" else lines
        assert "greenroom: a warning" in str(logged[0])
        assert "ValueError: why" in str(logged[2])


class TestTheEnd:
    def test_running_answers_end_in_the_grace_period(self, serve: Serve) -> None:
        running = serve(fake_engine("word " * 20, delay_s=0.02), grace=10.0)
        response: list[Any] = []
        thread = threading.Thread(
            target=lambda: response.append(running.post("/v1/chat/completions", CHAT))
        )
        thread.start()
        wait_for(lambda: running.engine.tickets)
        running.stop()
        thread.join()
        assert response[0].status_code == 200
        assert response[0].json()["choices"][0]["finish_reason"] == "stop"
        assert running.engine.stopped_after == 10.0

    @staticmethod
    def _stopped(running: Any, path: str, body: Any, begun: Callable[[Any], Any]) -> Any:
        """The response to a request during which the server stops, once it has `begun`."""
        response: list[Any] = []
        thread = threading.Thread(target=lambda: response.append(running.post(path, body)))
        thread.start()
        wait_for(lambda: running.engine.tickets and begun(running.engine.tickets[-1]))
        began = time.monotonic()
        running.stop()
        thread.join()
        assert time.monotonic() - began < 8
        return response[0]

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses",
                                      "/v1/messages", "/api/chat"])  # fmt: skip
    def test_longer_answers_end_with_their_text_so_far(
        self, serve: Serve, path: str, stream: bool
    ) -> None:
        running = serve(fake_engine("word " * 400, delay_s=0.02), grace=0.3)
        body = {**PATHS[path], "stream": stream}
        response = self._stopped(running, path, body, lambda ticket: ticket.sent_tokens > 5)
        assert response.status_code == 200
        assert "word" in response.text
        cut = {
            "/v1/responses": '"reason":"max_output_tokens"',
            "/v1/messages": '"max_tokens"',
            "/api/chat": '"done_reason":"length"',
        }
        assert cut.get(path, '"finish_reason":"length"') in response.text
        assert "stopping" not in response.text

    @pytest.mark.parametrize("stream", [False, True])
    def test_answers_without_a_token_get_an_error(self, serve: Serve, stream: bool) -> None:
        running = serve(fake_engine("word", first_s=60), grace=0.3)
        body = {**CHAT, "stream": stream}
        response = self._stopped(running, "/v1/chat/completions", body, lambda ticket: True)
        assert "the server is stopping" in response.text
        assert response.status_code == (200 if stream else 503)

    def test_a_stopped_server_accepts_no_connections(self, serve: Serve) -> None:
        import httpx2

        running = serve(fake_engine("Hi"))
        running.stop()
        with pytest.raises(httpx2.ConnectError):
            running.get("/health")


def test_the_document_describes_every_body(running: Running) -> None:
    response = running.get("/openapi.json").json()
    schemas = response["components"]["schemas"]
    for path in ("chat/completions", "completions", "responses", "messages", "admin/cache",
                 "admin/devices"):  # fmt: skip
        body = response["paths"][f"/v1/{path}"]["post"]["requestBody"]
        name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        assert schemas[name]["additionalProperties"] is False
    references = {
        part.split('"')[0] for part in json.dumps(response).split("#/components/schemas/")[1:]
    }
    assert references <= schemas.keys()
