"""A server with adapters: each request is answered by the variant that it names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import NAME, Running, fake_engine, launch

ASKED: Any = [{"role": "user", "content": "Hello"}]
MODELS = [NAME, "math", "law-2"]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    instance = launch(fake_engine("Hi"), adapters=MODELS[1:])
    yield instance
    instance.stop()


def variant(server: Running) -> int:
    """The variant of the latest request to the engine."""
    number = server.engine.tickets[-1].request.variant
    assert isinstance(number, int)
    return number


def test_all_variants_are_listed(server: Running) -> None:
    listed = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none").models.list()
    assert [model.id for model in listed] == MODELS
    body = server.get("/v1/models").json()
    assert (body["first_id"], body["last_id"]) == (NAME, "law-2")
    assert server.get("/v1/models/math").json()["id"] == "math"
    of_ollama = ollama.Client(server.url)
    assert [model.model for model in of_ollama.list().models] == MODELS
    assert of_ollama.show("math").capabilities == ["completion"]


@pytest.mark.parametrize("number", range(3))
def test_a_request_is_answered_by_the_variant_that_it_names(server: Running, number: int) -> None:
    name = MODELS[number]
    by_openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    answer = by_openai.chat.completions.create(model=name, messages=ASKED)
    assert (answer.model, variant(server)) == (name, number)
    chunks = list(by_openai.chat.completions.create(model=name, messages=ASKED, stream=True))
    assert ({chunk.model for chunk in chunks}, variant(server)) == ({name}, number)
    assert by_openai.completions.create(model=name, prompt="Hello").model == name
    assert variant(server) == number
    assert by_openai.responses.create(model=name, input="Hello", store=False).model == name
    assert variant(server) == number
    by_anthropic = anthropic.Anthropic(base_url=server.url, api_key="none")
    message = by_anthropic.messages.create(model=name, max_tokens=5, messages=ASKED)
    assert (message.model, variant(server)) == (name, number)
    of_ollama = ollama.Client(server.url)
    assert of_ollama.chat(f"{name}:latest", ASKED).model == name
    assert variant(server) == number
    assert of_ollama.generate(name, "").model == name  # loads


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_other_models_are_refused(server: Running, path: str) -> None:
    response = server.post(path, {"model": "poems", "messages": ASKED})
    assert response.status_code == 404
    assert "the model 'poems' does not exist: this server has 'tiny', 'math', 'law-2'" in (
        response.text
    )
    assert server.get("/v1/models/poems").status_code == 404


def test_log_and_metrics_name_the_adapter(server: Running) -> None:
    def answers() -> dict[str, float]:
        return {
            sample.labels["model"]: sample.value
            for family in text_string_to_metric_families(server.get("/metrics").text)
            for sample in family.samples
            if sample.name == "greenroom_queue_seconds_count"
        }

    before, count = answers(), len(server.lines)
    assert list(before) == MODELS
    server.post("/v1/chat/completions", {"model": "math", "messages": ASKED})
    assert answers() == {**before, "math": before["math"] + 1}
    assert " 200 · math · " in server.line(count + 1)
