"""Requests made from the OpenAPI document, right and wrong: no 500, no hang."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from greenroom.config import ServeConfig
from greenroom.server.api.shared import resizes
from greenroom.server.http.service import Service
from greenroom.server.web.app import api
from tests.server.conftest import NAME, Running, fake_engine, launch

SERVED = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/admin/cache"),
    ("POST", "/v1/admin/devices"),
    ("POST", "/v1/admin/cancel"),
    ("POST", "/api/chat"),
    ("POST", "/api/generate"),
    ("POST", "/api/show"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/v1/stats"),
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/api/tags"),
    ("GET", "/api/ps"),
    ("GET", "/api/version"),
]
BODIES = SERVED[:10]
KEY = "k"


def document() -> dict[str, Any]:
    """The server's, in which the model's name is the one that there is: others are all 404."""
    service = Service(fake_engine("Hi"), ServeConfig(), NAME)
    openapi_document = api(service).openapi()
    service.close()
    for schema in openapi_document["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"const": NAME, "type": "string"}
    return openapi_document


SCHEMA = schemathesis.openapi.from_dict(document())


@pytest.fixture(scope="module")
def guarded() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resizes, "REST_S", 0.0)  # a second between two resizes is for answers
        openapi_document = launch(fake_engine("Hi there", context=256), key=KEY)
        yield openapi_document
        openapi_document.stop()


def send(running: Running, method: str, path: str, mode: GenerationMode, examples: int) -> None:
    operation = SCHEMA[path][method]
    strategy = operation.as_strategy(generation_mode=mode)
    statuses: list[int] = []

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def each(case: Any) -> None:
        headers = {"x-api-key": KEY}
        response = case.call(base_url=running.url, headers=headers, timeout=100)
        statuses.append(response.status_code)
        assert response.status_code < 500, (case.body, response.text)
        if response.status_code >= 400:
            assert "error" in response.json()

    each()
    assert statuses
    if mode is GenerationMode.NEGATIVE and method == "POST":
        assert all(status >= 400 for status in statuses)


@pytest.mark.parametrize(("method", "path"), SERVED)
def test_valid_requests_do_not_break_the_server(guarded: Running, method: str, path: str) -> None:
    send(guarded, method, path, GenerationMode.POSITIVE, examples=8)


@pytest.mark.parametrize(("method", "path"), BODIES)
def test_invalid_requests_do_not_break_the_server(guarded: Running, method: str, path: str) -> None:
    send(guarded, method, path, GenerationMode.NEGATIVE, examples=8)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), BODIES)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_many_more_requests_do_not_break_the_server(
    guarded: Running, method: str, path: str, mode: GenerationMode
) -> None:
    send(guarded, method, path, mode, examples=400)
