"""Ollama's API, by its own package over a real socket."""

from __future__ import annotations

import copy
import json
from datetime import datetime
from typing import Any

import httpx2
import ollama
import pytest

from greenroom.errors import StoreError
from greenroom.server.api.ollama import models
from greenroom.server.api.ollama.models import rounded_count
from greenroom.server.api.ollama.responses import durations
from greenroom.server.engine.requests import Finished
from greenroom.server.http import streams
from tests.server.conftest import (
    NAME,
    Running,
    Serve,
    fake_engine,
    reasoning_engine,
    thinker_tokenizer,
)

QUESTION: Any = [{"role": "user", "content": "Hello"}]
CHAT = {"model": NAME, "messages": QUESTION}
TEXT = {"model": NAME, "prompt": "Hello"}
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}}
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
CALLED = '<think>Hm.</think>I look.<tool_call>{"name": "look", "arguments": {"place": "here"}}'
CALLED += "</tool_call>"


def client(running: Running, **options: Any) -> ollama.Client:
    return ollama.Client(host=running.url, timeout=100, **options)


def prompt_text(running: Running) -> str:
    text: str = running.engine.tokenizer.decode(running.engine.tickets[-1].request.ids)
    return text


class TestChat:
    def test_complete_and_streamed(self, serve: Serve) -> None:
        running = serve(fake_engine("Hello wörld 🎉"))
        complete = client(running).chat(NAME, QUESTION)
        assert complete.message.content == "Hello wörld 🎉"
        assert (complete.done, complete.done_reason, complete.model) == (True, "stop", NAME)
        ticket = running.engine.tickets[0]
        assert complete.prompt_eval_count == len(ticket.request.ids)
        assert complete.eval_count == ticket.sent_tokens
        lines = list(client(running).chat(NAME, QUESTION, stream=True))
        assert "".join(line.message.content or "" for line in lines) == "Hello wörld 🎉"
        assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
        assert lines[-1].eval_count == complete.eval_count

    def test_a_stream_is_the_default_and_one_object_a_line(self, serve: Serve) -> None:
        running = serve(fake_engine("one two"))
        response = running.post("/api/chat", CHAT)
        assert response.headers["content-type"].startswith("application/x-ndjson")
        lines = [json.loads(line) for line in response.text.splitlines()]
        assert len(lines) > 2
        assert all(datetime.fromisoformat(line["created_at"]).tzinfo for line in lines)
        assert running.post("/api/chat", {**CHAT, "stream": None}).text.count("\n") == len(lines)

    def test_reasoning_and_calls(self, serve: Serve) -> None:
        running = serve(reasoning_engine(CALLED))
        complete = client(running).chat(NAME, QUESTION, tools=[TOOL], think=True).message
        lines = list(client(running).chat(NAME, QUESTION, tools=[TOOL], stream=True))
        assert complete.thinking == "".join(line.message.thinking or "" for line in lines) == "Hm."
        assert complete.content == "I look."
        calls = [call for line in lines for call in line.message.tool_calls or ()]
        assert list(complete.tool_calls or ()) == calls
        assert calls[0].function.name == "look"
        assert calls[0].function.arguments == {"place": "here"}
        assert lines[-1].done_reason == "stop"
        result = {"role": "tool", "tool_name": "look", "content": "a wall"}
        client(running).chat(NAME, [*QUESTION, complete, result], tools=[TOOL])
        assert "<think>Hm.</think>I look.<tool_call>" in prompt_text(running)
        assert "<|im_start|>tool\na wall" in prompt_text(running)

    def test_thinking_can_be_switched_off_by_the_template(self, serve: Serve) -> None:
        running = serve(reasoning_engine("Hi"))
        client(running).chat(NAME, QUESTION, think=False)
        assert prompt_text(running).endswith("</think>\n\n")
        client(running).chat(NAME, QUESTION, think=True)
        assert not prompt_text(running).endswith("</think>\n\n")

    def test_json_and_schemas(self, serve: Serve) -> None:
        running = serve(fake_engine("{}"))
        grammars = []
        for form in ("json", PARAMETERS):
            assert client(running).chat(NAME, QUESTION, format=form).message.content == "{}"  # type: ignore[call-overload]
            grammars.append(running.engine.tickets[-1].request.grammar)
        client(running).chat(NAME, QUESTION, format="")
        assert running.engine.tickets[-1].request.grammar is None
        assert "place" in grammars[1]
        assert "place" not in grammars[0]

    def test_logprobs(self, serve: Serve) -> None:
        running = serve(fake_engine("one two"))
        complete: Any = client(running).chat(NAME, QUESTION, logprobs=True, top_logprobs=2)
        assert "".join(token.token for token in complete.logprobs) == "one two"
        assert all(len(token.top_logprobs) == 2 for token in complete.logprobs)
        lines: Any = list(client(running).chat(NAME, QUESTION, logprobs=True, stream=True))
        streamed = [token.token for line in lines for token in line.logprobs or ()]
        assert streamed == [token.token for token in complete.logprobs]

    def test_calls_without_ids_are_numbered_for_the_template(self, serve: Serve) -> None:
        engine = reasoning_engine("x")
        engine.tokenizer = copy.deepcopy(thinker_tokenizer())
        engine.tokenizer.chat_template = engine.tokenizer.chat_template.replace(
            "{{ m.content }}",
            "{{ m.content }}{{ m.tool_call_id or '' }}"
            "{% for c in m.tool_calls or [] %}[{{ c.id }}]{% endfor %}",
        )
        running = serve(engine)
        calls = [
            {"function": {"name": name, "arguments": {}}} for name in ("look", "smell", "look")
        ]
        history: Any = [
            *QUESTION,
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_name": "smell", "content": "A:"},
            {"role": "tool", "tool_name": "look", "content": "B:"},
            {"role": "tool", "content": "C:"},
        ]
        client(running).chat(NAME, history, tools=[TOOL])
        text = prompt_text(running)
        assert "[call00000][call00001][call00002]" in text
        for result in ("A:call00001", "B:call00000", "C:call00002"):
            assert result in text


class TestGenerate:
    def test_complete_and_streamed(self, serve: Serve) -> None:
        running = serve(fake_engine("Hello wörld"))
        complete = client(running).generate(NAME, "Hi", system="Be kind.")
        assert (complete.response, complete.done_reason) == ("Hello wörld", "stop")
        text = "<|begin|><|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>"
        assert prompt_text(running) == text
        lines = list(client(running).generate(NAME, "Hi", stream=True))
        assert "".join(line.response or "" for line in lines) == "Hello wörld"

    def test_a_raw_prompt_has_no_template(self, serve: Serve) -> None:
        running = serve(fake_engine("x"))
        client(running).generate(NAME, "Hello", raw=True)
        assert prompt_text(running) == "<|begin|>Hello"

    def test_reasoning(self, serve: Serve) -> None:
        running = serve(reasoning_engine("<think>Hm.</think>Yes."))
        complete = client(running).generate(NAME, "Hi")
        assert (complete.thinking, complete.response) == ("Hm.", "Yes.")

    def test_options_reach_the_engine(self, serve: Serve) -> None:
        running = serve(fake_engine("one two three"))
        options: Any = {
            "temperature": 0.5, "top_p": 0.9, "top_k": 0, "min_p": 0.1, "seed": 7,
            "repeat_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
            "num_predict": 2, "num_ctx": 512, "num_thread": 4, "mirostat": 0, "typical_p": 1.0,
        }  # fmt: skip
        complete = client(running).generate(NAME, "Hello", options=options, keep_alive="5m")
        assert (complete.done_reason, complete.eval_count) == ("length", 2)
        request = running.engine.tickets[0].request
        sampling = request.sampling
        assert request.max_new_tokens == 2
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 0)
        assert (sampling.min_p, sampling.seed, sampling.repetition_penalty) == (0.1, 7, 1.1)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, 0.3)
        client(running).generate(NAME, "Hello", options={"seed": -1, "num_predict": -1})
        assert running.engine.tickets[1].request.sampling.seed is None
        assert running.engine.tickets[1].request.max_new_tokens > 100

    def test_a_context_bounds_the_answer(self, serve: Serve) -> None:
        running = serve(fake_engine("word " * 20))
        client(running).generate(NAME, "Hello", options={"num_ctx": 16})
        request = running.engine.tickets[0].request
        assert len(request.ids) + request.max_new_tokens == 16
        with pytest.raises(ollama.ResponseError, match="num_ctx is 3"):
            client(running).generate(NAME, "Hello", options={"num_ctx": 3})
        with pytest.raises(ollama.ResponseError, match="above this server's context of 512"):
            client(running).generate(NAME, "Hello", options={"num_ctx": 513})

    def test_stop_strings(self, serve: Serve) -> None:
        running = serve(fake_engine("one STOP two"))
        complete = client(running).generate(NAME, "Hello", options={"stop": ["STOP"]})
        assert (complete.response, complete.done_reason) == ("one ", "stop")


@pytest.mark.parametrize("keep_alive", [-1, 300, 0.5, "5m", "1h30m", "-1m", "1.5h"])
def test_the_model_stays_loaded_as_asked(running: Running, keep_alive: Any) -> None:
    loaded = client(running).generate(NAME, keep_alive=keep_alive)
    assert (loaded.response, loaded.done, loaded.done_reason) == ("", True, "load")
    message = client(running).chat(NAME, [], keep_alive=keep_alive).message
    assert (message.role, message.content) == ("assistant", "")


@pytest.mark.parametrize(
    ("path", "change", "named"),
    [
        ("chat", {"messages": [{"role": "user", "content": "", "images": ["eA=="]}]}, "images"),
        ("chat", {"messages": [{"role": "critic", "content": "x"}]}, "messages.0.role"),
        ("chat", {"messages": [{"role": "user", "content": "x", "thinking": "y"}]}, "messages.0"),
        ("chat", {"messages": [{"role": "user", "tool_name": "x"}]}, "messages.0"),
        ("chat", {"tools": [TOOL]}, "tools"),
        ("chat", {"think": True}, "think"),
        ("chat", {"think": "much"}, "think"),
        ("chat", {"think": True, "format": "json"}, "think and format"),
        ("chat", {"format": "xml"}, "format"),
        ("chat", {"format": {"$ref": "http://elsewhere/x.json"}}, "format"),
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"keep_alive": 0}, "keep_alive"),
        ("chat", {"keep_alive": "0s"}, "keep_alive"),
        ("chat", {"keep_alive": "soon"}, "keep_alive"),
        ("chat", {"keep_alive": True}, "keep_alive"),
        ("chat", {"truncate": True}, "truncate"),
        ("chat", {"other": 1}, "other"),
        ("chat", {"options": {"mirostat": 2}}, "options.mirostat"),
        ("chat", {"options": {"mirostat": False}}, "options.mirostat"),
        ("chat", {"options": {"typical_p": 0.5}}, "options.typical_p"),
        ("chat", {"options": {"repeat_last_n": 64}}, "options.repeat_last_n"),
        ("chat", {"options": {"num_predict": 0}}, "options: num_predict"),
        ("chat", {"options": {"num_ctx": 0}}, "options.num_ctx"),
        ("chat", {"options": {"temperature": "hot"}}, "options.temperature"),
        ("chat", {"options": {"other": 1}}, "options.other"),
        ("generate", {"images": ["eA=="]}, "images"),
        ("generate", {"suffix": "x"}, "suffix"),
        ("generate", {"template": "{{ .Prompt }}"}, "template"),
        ("generate", {"context": [1, 2]}, "context"),
        ("generate", {"raw": True, "system": "x"}, "raw"),
        ("generate", {"prompt": 5}, "prompt"),
    ],
)
def test_errors_name_the_parameter(running: Running, path: str, change: Any, named: str) -> None:
    before = len(running.engine.tickets)
    response = running.post(f"/api/{path}", {**(CHAT if path == "chat" else TEXT), **change})
    assert response.status_code == 400
    assert set(response.json()) == {"error"}
    assert named in response.json()["error"]
    assert len(running.engine.tickets) == before


class TestErrors:
    def test_another_model_is_404_and_the_tag_latest_is_this_one(self, running: Running) -> None:
        assert client(running).generate(f"{NAME}:latest", "Hello").response == "Hi"
        for wrong in ("other", f"{NAME}:7b"):
            with pytest.raises(ollama.ResponseError, match="does not exist") as raised:
                client(running).chat(wrong, QUESTION)
            assert raised.value.status_code == 404
            with pytest.raises(ollama.ResponseError, match="does not exist"):
                client(running).show(wrong)

    def test_a_failing_answer(self, serve: Serve) -> None:
        running = serve(fake_engine("one two three"))
        running.engine.failing, running.engine.fail_after = StoreError("/secret"), 2
        with pytest.raises(ollama.ResponseError, match="try again") as raised:
            client(running).chat(NAME, QUESTION)
        assert raised.value.status_code == 500
        lines = client(running).chat(NAME, QUESTION, stream=True)
        assert next(lines).message.content == "one"
        with pytest.raises(ollama.ResponseError, match="try again"):
            list(lines)

    def test_limits_and_states_are_those_of_the_server(self, serve: Serve) -> None:
        running = serve(fake_engine("Hi", places=0), max_body="1KiB")
        response = running.post("/api/chat", CHAT)
        assert (response.status_code, response.headers["retry-after"]) == (429, "3")
        assert "queue" in response.json()["error"]
        assert running.post("/api/generate", {**TEXT, "prompt": "x" * 2000}).status_code == 413
        running.engine.now = ("loading", 0.25, "")
        for body in (CHAT, {"model": NAME}):
            response = running.post("/api/chat", body)
            assert (response.status_code, "25%" in response.json()["error"]) == (503, True)

    def test_every_path_needs_the_key(self, serve: Serve) -> None:
        running = serve(fake_engine("Hi"), key="k")
        for path in ("/api/tags", "/api/ps", "/api/version", "/api/pull"):
            response = running.get(path)
            assert response.status_code == 401
            assert isinstance(response.json()["error"], str)
        with pytest.raises(ollama.ResponseError, match="no API key"):
            client(running).chat(NAME, QUESTION)
        by_key = client(running, headers={"Authorization": "Bearer k"})
        assert by_key.chat(NAME, QUESTION).message.content == "Hi"

    def test_what_one_model_cannot_do(self, running: Running) -> None:
        by_ollama = client(running)
        for ask in (
            lambda: by_ollama.pull("x"),
            lambda: by_ollama.push("x"),
            lambda: by_ollama.create("x", from_="y"),
            lambda: by_ollama.copy("x", "y"),
            lambda: by_ollama.delete("x"),
            lambda: by_ollama.embed(NAME, "x"),
            lambda: by_ollama.embeddings(NAME, "x"),
        ):
            with pytest.raises(ollama.ResponseError, match="one model") as raised:
                ask()
            assert raised.value.status_code == 501


class TestModels:
    def test_the_model_is_listed_and_described(self, serve: Serve) -> None:
        running = serve(reasoning_engine("x"))
        assert [model.model for model in client(running).list().models] == [NAME]
        shown = client(running).show(NAME)
        assert shown.capabilities == ["completion", "tools", "thinking"]
        assert shown.template == running.engine.tokenizer.chat_template

    @pytest.mark.parametrize("version", ["0.2.0", "0.2.0.dev5+g0a1b2c3d.dirty", "0+unknown"])
    def test_the_version_is_numbers(
        self, running: Running, monkeypatch: pytest.MonkeyPatch, version: str
    ) -> None:
        """Open WebUI and others turn each part between dots into an integer."""
        monkeypatch.setattr(models, "__version__", version)
        shown = running.get("/api/version").json()["version"]
        assert version.startswith(shown)
        assert all(part.isdecimal() for part in shown.split("."))

    def test_no_model_runs_before_it_is_loaded(self, running: Running) -> None:
        assert list(client(running).ps().models) == []

    def test_capabilities_are_those_of_the_template(self, running: Running) -> None:
        assert client(running).show(NAME).capabilities == ["completion"]

    def test_show_needs_a_name(self, running: Running) -> None:
        response = running.post("/api/show", {})
        assert (response.status_code, response.json()["error"]) == (400, "model is missing")
        assert running.post("/api/show", {"name": NAME}).status_code == 200

    @pytest.mark.parametrize(
        ("count", "text"), [(9, "9"), (9_383_072, "9.4M"), (30_532_122_624, "30.5B")]
    )
    def test_parameters_are_rounded(self, count: int, text: str) -> None:
        assert rounded_count(count) == text


def test_durations_leave_out_the_queue() -> None:
    times = durations(Finished("stop", 3, 0, 5, 0.5, 2.0, 5.0, None))
    assert times == {
        "total_duration": 5_000_000_000, "load_duration": 0,
        "prompt_eval_count": 3, "prompt_eval_duration": 1_500_000_000,
        "eval_count": 5, "eval_duration": 3_000_000_000,
    }  # fmt: skip
    without = durations(Finished("length", 3, 0, 0, 0.5, None, 2.0, None))
    assert (without["prompt_eval_duration"], without["eval_duration"]) == (1_500_000_000, 0)


def test_a_silent_stream_sends_lines_that_clients_can_parse(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "BEAT_S", 0.15)
    running = serve(fake_engine("Hi", first_s=0.8))
    lines = list(client(running).chat(NAME, QUESTION, stream=True))
    assert [line.message.content for line in lines[:2]] == ["", ""]
    assert "".join(line.message.content or "" for line in lines) == "Hi"


def test_a_client_that_leaves_ends_its_answer(serve: Serve) -> None:
    running = serve(fake_engine("word " * 200, delay_s=0.02))
    lines = client(running).chat(NAME, QUESTION, stream=True)
    next(iter(lines))
    lines.close()  # type: ignore[attr-defined]
    assert running.engine.tickets[0].cancelled.wait(10)


def test_the_root_answers_get_and_head(running: Running) -> None:
    page, head = running.get("/"), httpx2.head(running.url + "/")
    assert (page.status_code, head.status_code) == (200, 200)
    assert "<!doctype html>" in page.text
    assert not head.content
    assert head.headers["content-length"] == page.headers["content-length"]
