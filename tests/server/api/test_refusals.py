"""Wrong requests get a status and the parameter's name, in the API's format."""

from __future__ import annotations

import json
import re
from typing import Any

import anthropic
import openai
import pytest

from greenroom.errors import ClosedError, DeviceError, StoreError
from tests.server.conftest import NAME, Running, Serve, fake_engine, reasoning_engine, wait_for

QUESTION: Any = [{"role": "user", "content": "Hello"}]
CHAT = {"model": NAME, "messages": QUESTION}
TEXT = {"model": NAME, "prompt": "Hello"}
RESPONSE = {"model": NAME, "input": "Hello"}
MESSAGE = {"model": NAME, "max_tokens": 5, "messages": QUESTION}
ENCRYPTED, CLEARED = "reasoning.encrypted_content", "clear_thinking_20251015"
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
PATHS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE,
}
TOOL = {"type": "function", "function": {"name": "look"}}


def check_openai(body: Any, status: int) -> Any:
    error = body["error"]
    assert set(body) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"].endswith("_error") or status in (413, 503)
    return error


def check_anthropic(body: Any) -> Any:
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    return body["error"]


def refused(running: Running, path: str, body: Any, status: int = 400, **options: Any) -> Any:
    """Send a request that must fail with `status`; return its error."""
    response = running.post(path, body, **options)
    assert response.status_code == status, response.text
    answer = response.json()
    return check_anthropic(answer) if path == "/v1/messages" else check_openai(answer, status)


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"max_tokens": -1}, "max_tokens"),
        ("/v1/chat/completions", {"max_tokens": "5"}, "max_tokens"),
        ("/v1/chat/completions", {"max_tokens": 1e9}, "max_tokens"),
        ("/v1/chat/completions", {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": "Hello"}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "x", "content": ""}]}, "messages.0.role"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages.0"),
        ("/v1/chat/completions", {"temperature": 3}, "temperature"),
        ("/v1/chat/completions", {"temperature": True}, "temperature"),
        ("/v1/chat/completions", {"top_p": 0}, "top_p"),
        ("/v1/chat/completions", {"n": 0}, "n"),
        ("/v1/chat/completions", {"n": 100}, "n"),
        ("/v1/chat/completions", {"stop": [""]}, "stop"),
        ("/v1/chat/completions", {"stop": ["a"] * 17}, "stop"),
        ("/v1/chat/completions", {"logit_bias": {"x": 1}}, "logit_bias"),
        ("/v1/chat/completions", {"logit_bias": {"1": 101}}, "logit_bias"),
        ("/v1/chat/completions", {"top_logprobs": 3}, "top_logprobs"),
        ("/v1/chat/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("/v1/chat/completions", {"audio": {"voice": "x"}}, "audio"),
        ("/v1/chat/completions", {"functions": []}, "functions"),
        ("/v1/chat/completions", {"store": True}, "store"),
        ("/v1/chat/completions", {"service_tier": "flex"}, "service_tier"),
        ("/v1/chat/completions", {"modalities": ["audio"]}, "modalities.0"),
        ("/v1/chat/completions", {"verbosity": "low"}, "verbosity"),
        ("/v1/chat/completions", {"chat_template": "{{ 1 }}"}, "chat_template"),
        ("/v1/chat/completions", {"generation_config": "{}"}, "generation_config"),
        ("/v1/chat/completions", {"tools": [TOOL]}, "tools"),
        ("/v1/chat/completions", {"tool_choice": "required"}, "tool_choice"),
        ("/v1/chat/completions", {"tool_choice": "must", "tools": [TOOL]}, "tool_choice"),
        ("/v1/chat/completions", {"tool_choice": "auto"}, "tool_choice"),
        ("/v1/chat/completions", {"response_format": {"type": "xml"}}, "response_format.type"),
        ("/v1/chat/completions", {"response_format": {"type": "json_schema"}}, "response_format"),
        ("/v1/chat/completions", {"model": "other"}, "model"),
        ("/v1/completions", {"prompt": ""}, None),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [1, "a"]}, "prompt"),
        ("/v1/completions", {"prompt": [-1]}, "prompt"),
        ("/v1/completions", {"prompt": [99999999]}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 129}, "prompt"),
        ("/v1/completions", {"best_of": 2}, "best_of"),
        ("/v1/completions", {"suffix": "x"}, "suffix"),
        ("/v1/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"max_tokens": -1, "echo": True}, "max_tokens"),
        ("/v1/completions", {"logprobs": 21, "echo": True}, "logprobs"),
        ("/v1/completions", {"logprobs": True}, "logprobs"),
        ("/v1/responses", {"input": []}, "input"),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ("/v1/responses", {"background": True}, "background"),
        ("/v1/responses", {"truncation": "auto"}, "truncation"),
        ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens"),
        ("/v1/responses", {"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ("/v1/responses", {"conversation": "c"}, "conversation"),
        ("/v1/responses", {"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ("/v1/responses", {"include": ["file_search_call.results"]}, "include.0"),
        ("/v1/responses", {"include": [ENCRYPTED], "top_logprobs": 1}, "top_logprobs"),
        ("/v1/responses", {"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ("/v1/responses", {"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ("/v1/responses", {"text": {"format": {"type": "json_schema"}}}, "text.format"),
    ],
)  # fmt: skip
def test_errors_name_the_parameter(
    running: Running, path: str, change: dict[str, Any], param: str | None
) -> None:
    if param is None:  # a text that has tokens all the same: the tokenizer adds one
        assert running.post(path, {**PATHS[path], **change}).status_code == 200
        return
    before = len(running.engine.tickets)
    status = 404 if "model" in change else 400
    error = refused(running, path, {**PATHS[path], **change}, status)
    assert error["param"] == param
    assert param.split(".")[0] in error["message"] or "does not exist" in error["message"]
    assert len(running.engine.tickets) == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"temperature": 1.5}, "temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"tools": [{"name": "look", "input_schema": {}}]}, "tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "many"}}, "tool_choice.type"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"context_management": {"edits": [{"type": CLEARED, "keep": 1}]}}, "context_management"),
        ({"context_management": {"edits": [{"type": "compact"}]}}, "context_management"),
        ({"messages": [*QUESTION, {"role": "system", "content": [RESULT]}]}, "tool_result"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "thinking",
        ),
    ],
)
def test_errors_name_the_parameter_in_anthropics_api(
    running: Running, change: dict[str, Any], named: str
) -> None:
    error = refused(running, "/v1/messages", {**MESSAGE, **change})
    assert error["type"] == "invalid_request_error"
    assert named in error["message"]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_parts_that_are_not_text_are_refused(running: Running, kind: str) -> None:
    content = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "x"}}]
    body = {**CHAT, "messages": [{"role": "user", "content": content}]}
    error = refused(running, "/v1/chat/completions", body)
    assert kind in error["message"]
    assert error["param"] == "messages.0.content"


def test_another_models_name_is_404(running: Running) -> None:
    for path, body in PATHS.items():
        error = refused(running, path, {**body, "model": "Qwen/Qwen3-30B-A3B"}, 404)
        assert "does not exist" in error["message"]


def test_an_unsupported_schema_is_refused(running: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "http://elsewhere/x.json"}}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    error = refused(running, "/v1/chat/completions", {**CHAT, "response_format": form})
    assert error["param"] == "response_format.json_schema.schema"


def test_tools_and_json_exclude_each_other(serve: Serve) -> None:
    body = {**CHAT, "tools": [TOOL], "response_format": {"type": "json_object"}}
    error = refused(serve(reasoning_engine("x")), "/v1/chat/completions", body)
    assert error["param"] == "response_format"


def test_tool_results_need_a_template_with_tools(running: Running) -> None:
    result = {"role": "tool", "tool_call_id": "c", "content": "x"}
    body = {**CHAT, "messages": [*QUESTION, result]}
    assert "tool" in refused(running, "/v1/chat/completions", body)["message"]


def test_a_prompt_without_room_is_too_long(serve: Serve) -> None:
    running = serve(fake_engine("Hi", context=8))
    error = refused(running, "/v1/chat/completions", CHAT | {"messages": QUESTION * 8})
    assert error["code"] == "context_length_exceeded"
    assert (
        "room" in refused(running, "/v1/messages", {**MESSAGE, "messages": QUESTION * 8})["message"]
    )


def test_a_full_queue_is_429_with_retry_after(serve: Serve) -> None:
    running = serve(fake_engine("Hi", places=0))
    for path, body in PATHS.items():
        response = running.post(path, body)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "3"
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model=NAME, prompt="x")


def test_choices_that_do_not_all_fit_are_refused(serve: Serve) -> None:
    running = serve(fake_engine("word " * 50, places=2, delay_s=0.01))
    assert running.post("/v1/chat/completions", {**CHAT, "n": 3}).status_code == 429
    assert len(running.engine.tickets) == 2
    assert all(ticket.cancelled.is_set() for ticket in running.engine.tickets)


def test_a_server_that_is_not_ready_is_503(serve: Serve) -> None:
    running = serve(fake_engine("Hi"))
    running.engine.failure = StoreError("/secret/path is damaged")
    for state, progress in (("loading", 0.25), ("failed", 1.0), ("stopping", 1.0)):
        running.engine.now = (state, progress, "/secret/path is damaged")
        health = running.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == state
        response = running.post("/v1/chat/completions", CHAT)
        assert response.status_code == 503
        assert "retry-after" in response.headers
        assert "secret" not in response.text + health.text
        if state == "failed":
            assert health.json()["why"] == "reading a part of the model failed (StoreError)"
    assert "25%" in _loading(running)
    running.engine.now = ("ready", 1.0, "")
    assert running.get("/health").json() == {"status": "ready"}


def _loading(running: Running) -> str:
    running.engine.now = ("loading", 0.25, "")
    assert running.get("/health").json()["progress"] == 0.25
    return str(running.post("/v1/chat/completions", CHAT).json()["error"]["message"])


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StoreError("/secret/model.safetensors: read error"), 500),
        (DeviceError("/secret: out of memory"), 500),
        (ClosedError("/secret"), 503),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_errors_in_an_answer_name_no_files(
    serve: Serve, error: Any, status: int, path: str
) -> None:
    running = serve(fake_engine("one two three"))
    running.engine.failing, running.engine.fail_after = error, 2
    error = refused(running, path, PATHS[path], status)
    assert "secret" not in json.dumps(error)
    wait_for(lambda: any("/secret" in line for line in running.lines))
    body = {**PATHS[path], "stream": True}
    text = running.post(path, body).text
    assert "secret" not in text
    assert "error" in text.rstrip().rsplit("\n\n", 1)[-1]
    assert "[DONE]" not in text
    running.engine.failing = None
    assert running.post(path, PATHS[path]).status_code == 200


def test_a_broken_stream_raises_in_the_clients(serve: Serve) -> None:
    running = serve(fake_engine("one two three"))
    running.engine.failing, running.engine.fail_after = StoreError("x"), 2
    by_openai = openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.APIError, match="try again"):
        list(by_openai.chat.completions.create(model=NAME, messages=QUESTION, stream=True))
    by_anthropic = anthropic.Anthropic(base_url=running.url, api_key="x", max_retries=0)
    with pytest.raises(anthropic.APIError, match="try again"):
        list(by_anthropic.messages.create(**MESSAGE, stream=True))  # type: ignore[call-overload]


def test_a_late_answer_is_504(serve: Serve) -> None:
    running = serve(fake_engine("word " * 50, delay_s=0.05), timeout=0.2)
    assert "0.2 seconds" in refused(running, "/v1/chat/completions", CHAT, 504)["message"]
    assert refused(running, "/v1/messages", MESSAGE, 504)["type"] == "timeout_error"


def test_an_unexpected_error_is_500_and_the_server_goes_on(
    serve: Serve,
) -> None:
    running = serve(fake_engine("Hi"))
    running.engine.stats = lambda: 1 / 0  # type: ignore[assignment,return-value]
    response = running.get("/v1/stats")
    assert response.status_code == 500
    check_openai(response.json(), 500)
    assert "division" not in response.text
    wait_for(lambda: any("ZeroDivisionError" in line for line in running.lines))
    assert running.post("/v1/chat/completions", CHAT).status_code == 200


def test_a_connection_is_reused_after_an_error(serve: Serve) -> None:
    import httpx2

    running = serve(fake_engine("Hi"))
    running.engine.failing = StoreError("x")
    with httpx2.Client(base_url=running.url) as client:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 500
        running.engine.failing = None
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        pool: Any = client._transport._pool  # type: ignore[attr-defined]
        assert len(pool.connections) == 1


def test_request_ids_of_clients_are_not_used(running: Running) -> None:
    headers = {"x-request-id": "same"}
    responses = [running.post("/v1/chat/completions", CHAT, headers=headers) for _ in range(2)]
    ids = [response.headers["x-request-id"] for response in responses]
    assert [response.status_code for response in responses] == [200, 200]
    assert len(set(ids)) == 2
    assert all(re.fullmatch(r"req_[0-9a-f]{16}", each) for each in ids)


def test_unknown_paths_and_methods_are_errors(running: Running) -> None:
    assert check_openai(running.get("/v1/nothing").json(), 404)["type"] == "not_found_error"
    assert running.get("/v1/chat/completions").status_code == 405
    assert check_anthropic(running.get("/v1/messages").json())["type"] == "invalid_request_error"
    assert running.get("/docs").status_code == 404
