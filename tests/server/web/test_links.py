"""Sequences of requests that the OpenAPI document's links make: no 500, no hang, no refusal."""

from __future__ import annotations

import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import FlakyStrategyDefinition
from schemathesis.generation.stateful.state_machine import APIStateMachine, StepInput, StepOutput

from greenroom.server.api.shared import resizes
from greenroom.server.web.links import LINKS
from tests.cli.test_serve import served
from tests.server.conftest import NAME, fake_engine, launch

KEY = {"x-api-key": "k"}
QUESTION = {"prompt": "The king of the town", "max_tokens": 30, "temperature": 0, "logprobs": 2}
SETTINGS = settings(
    max_examples=10,
    stateful_step_count=8,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
BEFORE = "from greenroom.server.api.shared import resizes; resizes.REST_S = 0.0\n"


def document(url: str, model: str) -> dict[str, Any]:
    """The server's, with the name of its model, bodies of links as they are, and valid changes."""
    found: dict[str, Any] = httpx2.get(f"{url}/openapi.json", headers=KEY).json()
    for schema in found["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"const": model, "type": "string"}
    schemas = found["components"]["schemas"]
    schemas["CacheSize"]["properties"]["cache"] = {"enum": ["20%", "50%", "100%", "0%"]}
    schemas["Devices"]["properties"]["devices"] = {"enum": ["fake", "fake,fake", "cuda"]}
    for method, path in LINKS:
        for link in found["paths"][path][method]["responses"]["200"]["links"].values():
            link["x-schemathesis"] = {"merge_body": False}
    return found


def follow(url: str, model: str, requests: int) -> Counter[tuple[str, int]]:
    """Send sequences of requests; how often each link, or `random`, had each status."""
    counts, wrong = Counter[tuple[str, int]](), list[str]()
    openapi = schemathesis.openapi.from_dict(document(url, model))
    base: type[APIStateMachine] = openapi.as_state_machine()

    class Machine(base):  # type: ignore[valid-type, misc]
        def step(self, input: StepInput) -> StepOutput:
            output: StepOutput = super().step(input)
            response, case = output.response, input.case
            linked = input.transition is not None and bool(input.applied_parameters)
            name = input.transition.id if linked else "random"  # type: ignore[union-attr]
            counts[name, response.status_code] += 1
            if not is_right(case.path, linked, response):
                wrong.append(f"{name}: {case.path} {case.body}: {response.text}")
            return output

        def get_call_kwargs(self, case: Any) -> dict[str, Any]:
            return {"base_url": url, "headers": KEY, "timeout": 60}

        def validate_response(self, *args: Any, **kwargs: Any) -> None:
            """Leave it to `is_right`: the document has no statuses of errors."""

    while counts.total() < requests:
        with suppress(FlakyStrategyDefinition):  # what follows depends on the server's answers
            Machine.run(settings=SETTINGS)
    assert not wrong, wrong
    return counts


def is_right(path: str, linked: bool, response: Any) -> bool:
    """Check the status: what the server has said is never refused, and no request breaks it."""
    if response.status_code >= 400 and "error" not in response.json():
        return False
    if linked:  # a request that can be cancelled has ended
        return response.status_code == (404 if path == "/v1/admin/cancel" else 200)
    return response.status_code < 500


def test_links_of_a_fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resizes, "REST_S", 0.0)
    running = launch(fake_engine("Hi there"), key="k")
    try:
        counts = follow(running.url, NAME, requests=80)
    finally:
        running.stop()
    assert sum(n for (link, status), n in counts.items() if link != "random" and status == 200) > 10


def check_sequences(folder: Path, requests: int) -> None:
    """Send sequences to a real server, which meanwhile answers another client as before."""
    options = ("--device", "fake,fake", "--spare-devices", 1, "--batch-invariant", "--max-tokens",
               24, "--prompt-cache", folder)  # fmt: skip
    environment = {**os.environ, "GREENROOM_API_KEY": "k"}
    with served(*options, before=BEFORE, env=environment) as (process, url, _):

        def ask() -> Any:
            body = {"model": "demo", **QUESTION}
            return httpx2.post(f"{url}/v1/completions", json=body, headers=KEY, timeout=60).json()

        expected, ended = ask()["choices"], threading.Event()

        def ask_again() -> int:
            count = 0
            while not ended.wait(0.2):
                assert ask()["choices"] == expected
                count += 1
            return count

        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(ask_again)
            try:
                counts = follow(url, "demo", requests)
            finally:
                ended.set()
            assert other.result() > 5
        assert process.poll() is None
        stats = httpx2.get(f"{url}/v1/stats", headers=KEY).json()
        assert stats["queue"]["running"] == stats["queue"]["waiting"] == 0
        assert stats["kv"]["reserved_bytes"] == 0
    links = {link for link, status in counts if status == 200}
    print(f"{counts.total()} requests; {len(links)} links: {sorted(counts.items())}")
    assert len(links) > 5


@pytest.mark.process
@pytest.mark.timeout(240)
def test_sequences_of_requests_to_a_real_server(tmp_path: Path) -> None:
    check_sequences(tmp_path, requests=240)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_more_sequences_of_requests(tmp_path: Path) -> None:
    check_sequences(tmp_path, requests=12_000)
