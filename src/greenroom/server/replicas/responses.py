"""Responses joined from several replicas, and the last event of a broken stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from greenroom.server.api.ollama.responses import is_empty_line
from greenroom.server.http.errors import ANTHROPIC_PATH, OLLAMA_PATH, ApiError
from greenroom.server.http.streams import BEAT, event
from greenroom.server.web.calls import Headers

# Paths that all replicas answer.
EVERYWHERE = ("/metrics", "/v1/admin/cache", "/v1/admin/devices", "/v1/admin/cancel")
CHANGES = ("/v1/admin/cache", "/v1/admin/devices")  # that every replica must make
RESPONSES_PATH = "/v1/responses"
Answer = tuple[str, int, Headers, bytes]  # a replica's name, and status, headers, body


def is_beat(path: str, part: bytes) -> bool:
    """Check whether a part of a stream has no content.

    `path` is that of the API.
    """
    return part == BEAT or (path.startswith(OLLAMA_PATH) and is_empty_line(part))


def last_event(path: str, error: ApiError, number: int) -> bytes:
    """Encode an error as the last event of a stream.

    `path` is that of the API, whose format the event has.
    `number` is how many events the client has received before.
    """
    if path.startswith(RESPONSES_PATH):
        failed: dict[str, Any] = {
            "type": "error", "code": "server_error", "message": str(error), "param": None,
            "sequence_number": number,
        }  # fmt: skip
        return event(failed, "error")
    body = error.body(path, "")
    if path.startswith(OLLAMA_PATH):
        return json.dumps(body, ensure_ascii=False).encode() + b"\n"
    return event(body, "error" if path.startswith(ANTHROPIC_PATH) else None)


def joined(path: str, answers: Sequence[Answer], lost: int) -> tuple[int, Headers, bytes]:
    """Make one response of those of all replicas, of which some were `lost`.

    It is the best one, or has all of their metrics. For a change that every replica must make it is
    the worst one, with the result of each.
    """
    _, status, headers, body = min(answers, key=lambda each: each[1])
    if path in CHANGES:
        status, body = _changed(path, answers, lost)
    elif path == "/metrics" and status == 200:
        body = merged_metrics([(name, page) for name, code, _, page in answers if code == 200])
    others = [each for each in headers if each[0] != b"content-length"]
    return status, [*others, (b"content-length", str(len(body)).encode())], body


def _changed(path: str, answers: Sequence[Answer], lost: int) -> tuple[int, bytes]:
    """Make status and body of a change: those of the replica with the worst result."""
    results = {name: {"status": status, **json.loads(body)} for name, status, _, body in answers}
    _, status, _, body = max(answers, key=lambda each: each[1])
    content = json.loads(body)
    if lost:
        status = 502
        message = f"{lost} of {lost + len(answers)} replicas did not answer: send it again"
        content = ApiError(status, message).body(path, "")
    return status, json.dumps({**content, "replicas": results}).encode()


def merged_metrics(pages: Sequence[tuple[str, bytes]]) -> bytes:
    """Merge Prometheus pages, each with its replica's name, which becomes a label."""
    merged: dict[str, Metric] = {}
    for replica, page in pages:
        for family in text_string_to_metric_families(page.decode()):
            metric = merged.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for each in family.samples:
                labels = {**each.labels, "replica": replica}
                metric.samples.append(each._replace(labels=labels))
    return generate_latest(SimpleNamespace(collect=merged.values))
